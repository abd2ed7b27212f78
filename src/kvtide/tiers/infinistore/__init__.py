"""Records on an InfiniStore server, asked by its own protocol over TCP."""
