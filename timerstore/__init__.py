"""The timer store: a disposable, local index of pending timers. Knows neither Kafka nor Spark.

`TimerStore` (store.py) is the one public class. The rest of the package is its parts, one noun a file:

    position   the total order (at, source, offset), and what is committed of it
    sources    the partitions of the delay topics, numbered
    entry      the columns of an entry
    runs       resident rows: sorted runs of row references (the ready rows and the memtable are two of them)
    chunks     the Arrow batches that those references point into
    late       rows that the delivered position has passed already, by offset
    wheel      how many entries are pending in each slot of time
    segment    one immutable, sorted Parquet file;  timerlog  all live ones
    checkpoint what the index covers;  recovery  from the directory to an open store
    transaction what is handed out for delivery, and its two ends
"""
