"""Environments over WebSockets: the wire, the server, the client, leased backends, and two environments."""
