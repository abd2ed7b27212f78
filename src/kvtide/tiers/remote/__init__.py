"""The frame of tiers on servers: queues, threads, bounds; a store's client is all that differs."""
