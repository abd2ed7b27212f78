"""Records in a Mooncake Store, by its own client, which runs in processes beside the node."""
