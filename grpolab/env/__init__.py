"""Environments over WebSockets: the wire, the server, the client, and two environments."""
