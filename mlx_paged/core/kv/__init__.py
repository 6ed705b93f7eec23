"""The KV store: a manager over the prefix tree, the KV cache groups and their block pools."""
