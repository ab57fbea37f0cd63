"""`distserve bench`: load for any server that speaks OpenAI's API, and what came of it.

A plan of traffic that is a function of its seed (traffic, over lengths, arrivals, trace), turned into requests of
exact length (prompts, body), sent and stamped (client, over wire), taken apart afterwards (sse, answers), summed up
(quantiles, summary), shown (text, page over charts). run.py measures one server, compare.py two.
"""
