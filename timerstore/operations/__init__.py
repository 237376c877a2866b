"""Operations on a store: ingest, transactions, maintenance, compaction, recovery, searches."""
