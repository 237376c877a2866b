"""The timer store: a disposable, local index of the pending timers of one log. It knows neither Kafka nor Spark.

`TimerStore` (store.py) is the one public class. The folders are layers. Each imports only layers above it in this list:

    rows        the columns of a row, the total order (at, offset), and the committed state
    disk        durable files, column files, the checkpoint
    memory      ready rows, memtable and overtaken rows; counts of pending timers; the memory of several stores
    cancels     tombstones, the id index, commands
    log         segments (immutable, sorted Parquet files), and the TimerLog of all live segments
    operations  on the shared state: ingest, transaction, timer wheel, maintenance, compaction, recovery, stats
"""
