"""Records on Redis or Valkey: alone, behind Sentinels, or a cluster."""
