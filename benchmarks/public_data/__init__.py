"""Public data sets through `gear ingest`, each compared with an independent read of its files."""
