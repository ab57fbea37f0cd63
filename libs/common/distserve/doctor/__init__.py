"""`distserve doctor`: is this host, its network and its NATS as DistServe needs them, and what mends what is not?"""
