"""Paged attention, KV writes and block copies: one implementation per kind of device."""
