"""The KV store: the manager joins the prefix tree, the KV cache groups and their block pools."""
