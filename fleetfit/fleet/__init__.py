"""A fleet of real devices, with Flower: the server's app, a device's node, and what both need.

`fleetfit flower init` writes a Flower app, `fleetfit flower node` runs a device's node, and `flwr run` starts a run.
The server sends each node the sub-model that fits it, as `fleetfit.messages` messages.

- The server's side: `server_app` (what Flower starts: the run), `engine` (jobs out, updates in), `client_manager` (the
  nodes of a run), `transport` (messages, replies, lost jobs).
- The device's side: `launcher` (a node's processes), `connection` (to the SuperLink), `client_app` (what Flower starts
  for each message), `worker` (the process that keeps torch, data and models), `node` (its answers and its memory),
  `settings` (its configuration file).
- Both: `protocol` (the messages' contents), `secure_aggregation` (the messages of secure rounds), `logs`.
- Beforehand: `app_folder` (what `flwr run` takes), `certificates`.
- `warm`, behind the switch `warm_start`: reduces the cost of a message from five seconds to half a second. It alone
  uses names inside Flower, and everything works without it.

Nothing here imports torch or Flower: the process that Flower starts for each message reads this module first.
"""
