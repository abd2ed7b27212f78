"""The command line: `kvtide serve`, `status`, `stop`, `clear`, `logs`, `doctor`, `config`."""
