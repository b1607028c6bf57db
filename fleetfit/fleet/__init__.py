"""A fleet of real devices, with Flower: the server's app, a device's node, and what both need.

`fleetfit flower init` writes a Flower app, `fleetfit flower node` runs a device's node, and `flwr run` starts a run.
The server sends each node the sub-model that fits it, as `fleetfit.messages` messages.

- The server's side: `server_app` (what Flower starts: the run), `engine` (jobs out, updates in), `client_manager` (the
  nodes of a run), `transport` (messages, replies, lost jobs), `server_watch` (reports a server app that was killed).
- The device's side: `launcher` (joins and leaves), `connection` (why the SuperLink cannot be reached), `superlink`
  (Flower's Fleet API), `node_loop` (message, worker, reply), `worker` (the process that keeps torch, data and models),
  `node` (its answers and its memory), `settings` (its configuration file), `client_app` (for Flower's own node).
- Both: `protocol` (the messages' contents), `secure_aggregation` (the messages of secure rounds), `logs`.
- Beforehand: `app_folder` (what `flwr run` takes), `certificates`.

Names inside Flower are in `superlink`, `server_watch` and `transport` alone, one more in `server_app`;
`tests/fleet/test_fence.py` lists them. Nothing here imports torch or Flower: a node's two processes do with one of them
each.
"""

PROTOCOL = 4
"""Version of the form and the content of messages; here, since a node's loop has no torch, and its worker no Flower."""
