"""`distserve monitor`: a cluster on a terminal, or as lines, from what a gateway says at GET /status.

source     one GET with a deadline
watching   asks again and again on a thread; keeps the last picture
words      numbers as short text; sparklines, bars
panes      the parts of the picture: figures, services, tiers, flows, ...
fitting    which of them a screen has room for
picture    the whole, drawn
screen     the picture that renews itself, and its keys
lines      without a terminal: plain pictures, JSON, one series
leaves     every figure of a ClusterStatus by its dotted name; samples: one of Prometheus's by its own
"""
