"""Speaks: frames over one unix stream socket, the node's server and the engines' link."""
