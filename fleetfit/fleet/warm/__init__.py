"""The warm start: a node forks a process that has Flower imported for each message, instead of starting one.

The node's worker keeps what is FleetFit's own (torch, data, models) whoever starts the client app; what is left of a
message's cost is Flower's: starting Python, importing Flower, and sleeping between two looks. So it is one mechanism
with two processes that stay, since neither can be the other: the zygote has Flower and a single thread, without which
nothing may fork; the worker has torch's threads, and models that a fork would have to make anew for each message. A
fork of the zygote runs the client app, which asks the worker. (A message costs about 0.5 s so, and 4 s and more where
Flower starts a process.)

- `zygote`: imports Flower, and forks for each message;
- `supernode`: Flower's SuperNode with shorter sleeps, and the SuperExec that hands its messages to the zygote;
- `turns`: what that SuperNode needs so that each message gets its own reply;
- `server_app`: replies that are asked for often, and somebody who says that the server app was killed;
- `private_names`: all of it leans on names inside Flower, which are listed and checked there.

This is the only part of FleetFit that uses such names. The launcher starts it, the server app uses it, and nothing else
imports it; where Flower has changed, with `--cold`, or where nothing can be forked, nodes do without the fork; with
`flower-supernode` they do without all of it.
"""
