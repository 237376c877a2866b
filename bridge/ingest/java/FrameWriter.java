package delaybridge;

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.net.UnixDomainSocketAddress;
import java.nio.ByteBuffer;
import java.nio.channels.Channels;
import java.nio.channels.SocketChannel;
import java.nio.charset.StandardCharsets;
import java.util.Iterator;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;

import org.apache.arrow.memory.BufferAllocator;
import org.apache.arrow.memory.RootAllocator;
import org.apache.arrow.vector.BigIntVector;
import org.apache.arrow.vector.BitVector;
import org.apache.arrow.vector.FieldVector;
import org.apache.arrow.vector.IntVector;
import org.apache.arrow.vector.SmallIntVector;
import org.apache.arrow.vector.TinyIntVector;
import org.apache.arrow.vector.VarBinaryVector;
import org.apache.arrow.vector.VarCharVector;
import org.apache.arrow.vector.VectorSchemaRoot;
import org.apache.arrow.vector.VectorUnloader;
import org.apache.arrow.vector.complex.ListVector;
import org.apache.arrow.vector.complex.StructVector;
import org.apache.arrow.vector.ipc.WriteChannel;
import org.apache.arrow.vector.ipc.message.ArrowRecordBatch;
import org.apache.arrow.vector.ipc.message.MessageSerializer;
import org.apache.spark.api.java.function.ForeachPartitionFunction;
import org.apache.spark.sql.ForeachWriter;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.ArrowUtils;

/**
 * The sink of the ingest query: decoded rows leave Spark as Arrow record batches, frames, through a socket to the
 * bridge.
 *
 * <p>All tasks of a JVM write through one connection. A task sends a full frame at once, and any other frame when one
 * of its rows has waited for a share of the time that is left until its due time. A frame costs the bridge as much as a
 * hundred rows, and due rows of many small frames take long to combine. The socket is the flow control: while the
 * bridge does not read, a write blocks, so does {@link #process}, and Spark's Kafka consumer stops fetching. Memory
 * holds one frame and the socket's buffer.
 *
 * <p>A task that has caught up rests after the first row that it waited for, for a share of the time that is left until
 * its due time: one fetch then brings the rows of twenty. Fetches are half of the JVM's cost at a low rate.
 *
 * <p>A connection begins with the token and a newline, each frame with its length (int32, big-endian). A length of 0
 * marks the end. A length of -1 has no frame, and reports the start of a task. Rows of a partition come in the order of
 * their offsets. The last open task waits on closing for the bridge's byte, which follows the storage of all rows:
 * Spark may count a batch as done only then.
 */
public final class FrameWriter extends ForeachWriter<Row> implements ForeachPartitionFunction<Row> {
  private static final int ROWS_MAX = 4096;
  private static final int BYTES_MAX = 1 << 20;
  // Wait of a row: its remaining time / WAIT_SHARE, between GATHER and LATEST, and INTERVAL after the last frame.
  private static final long WAIT_SHARE = 4;
  private static final long LATEST_NANOS = 200_000_000;
  private static final long GATHER_NANOS = 1_000_000;
  private static final long INTERVAL_NANOS = 10_000_000;
  private static final long WAITED_NANOS = 300_000; // a longer gap between two rows of a task is a wait for the second
  private static final int CAUGHT_UP_ROWS = 100; // more rows without a wait between them are a backlog
  private static final long FRESH_MS = 250; // an older row is a backlog, too: the gap may be a lack of CPU
  // Rest of a task: the remaining time of its row / REST_SHARE, up to REST_MS_MAX.
  private static final long REST_SHARE = 8;
  private static final long REST_MS_MAX = 50;
  /** By token: all runs of a query may have the same address. */
  private static final Map<String, Connection> CONNECTIONS = new ConcurrentHashMap<>();

  private final String address;
  private final String token;
  private final String schema;
  private transient Connection connection;
  private transient long lastNanos;
  private transient int rowsSinceWait;

  /** {@code address} is a path, or {@code host:port}; {@code schema} that of the rows, as Spark's JSON. */
  public FrameWriter(String address, String token, String schema) {
    this.address = address;
    this.token = token;
    this.schema = schema;
  }

  @Override
  public boolean open(long partition, long epoch) {
    try {
      connection = acquire();
      connection.begin();
    } catch (IOException e) {
      close(e);
      throw new IllegalStateException("the bridge does not take frames at " + address, e);
    }
    return true;
  }

  @Override
  public void process(Row row) {
    try {
      long restMs = connection.add(row);
      if (System.nanoTime() - lastNanos > WAITED_NANOS) {
        if (rowsSinceWait < CAUGHT_UP_ROWS) {
          Thread.sleep(restMs);
        }
        rowsSinceWait = 0;
      }
    } catch (IOException e) {
      throw new IllegalStateException("the bridge does not take frames any more", e);
    } catch (InterruptedException e) { // Spark ends the task
      Thread.currentThread().interrupt();
    }
    rowsSinceWait++;
    lastNanos = System.nanoTime();
  }

  @Override
  public void close(Throwable failure) {
    Connection mine = connection;
    connection = null;
    if (mine == null) {
      return;
    }
    try {
      release(mine, failure == null);
    } catch (IOException e) {
      throw new IllegalStateException("the bridge has not taken the last frames", e);
    }
  }

  @Override
  public void call(Iterator<Row> rows) {
    open(0, 0);
    Throwable failure = null;
    try {
      while (rows.hasNext()) {
        process(rows.next());
      }
    } catch (RuntimeException | Error e) {
      failure = e;
      throw e;
    } finally {
      close(failure);
    }
  }

  private Connection acquire() throws IOException {
    synchronized (CONNECTIONS) {
      Connection open = CONNECTIONS.get(token);
      if (open == null) {
        open = new Connection(address, token, schema);
        CONNECTIONS.put(token, open);
      }
      open.users++;
      return open;
    }
  }

  /** The last user of a connection ends it; the next task makes another. */
  private void release(Connection open, boolean complete) throws IOException {
    synchronized (CONNECTIONS) {
      if (--open.users > 0) {
        return;
      }
      CONNECTIONS.remove(token, open);
    }
    open.end(complete);
  }

  private static final class Connection {
    private final BufferAllocator allocator = new RootAllocator();
    private final SocketChannel channel;
    private final VectorSchemaRoot root;
    private final StructType type;
    private final Setter[] setters;
    private final int at;
    private final int ts;
    private final int replace;
    private int users;
    // Guarded by this.
    private int rows;
    private long bytes;
    private long leaveNanos;
    private long sentNanos = System.nanoTime() - INTERVAL_NANOS;
    private IOException failure;
    private boolean ended;

    Connection(String address, String token, String schema) throws IOException {
      type = (StructType) StructType.fromJson(schema);
      root = VectorSchemaRoot.create(ArrowUtils.toArrowSchema(type, "UTC", true, false), allocator);
      root.allocateNew();
      at = type.fieldIndex("at");
      ts = type.fieldIndex("ts");
      replace = type.fieldIndex("replace");
      setters = new Setter[type.length()];
      for (int i = 0; i < setters.length; i++) {
        setters[i] = setter(root.getVector(i), i);
      }
      channel = connect(address);
      write(ByteBuffer.wrap((token + "\n").getBytes(StandardCharsets.US_ASCII)));
      Thread flusher = new Thread(this::flushInTime, "frames");
      flusher.setDaemon(true);
      flusher.start();
    }

    private static SocketChannel connect(String address) throws IOException {
      if (address.startsWith("/")) {
        return SocketChannel.open(UnixDomainSocketAddress.of(address));
      }
      int colon = address.lastIndexOf(':');
      int port = Integer.parseInt(address.substring(colon + 1));
      SocketAddress peer = new InetSocketAddress(address.substring(0, colon), port);
      return SocketChannel.open(peer);
    }

    /** Report the start of a task. */
    synchronized void begin() throws IOException {
      check();
      write(ByteBuffer.allocate(4).putInt(-1).flip());
    }

    /** Returns the rest of the row's task, in ms. */
    synchronized long add(Row row) throws IOException {
      check();
      for (Setter setter : setters) {
        bytes += setter.set(rows, row);
      }
      long nowMs = System.currentTimeMillis();
      // A replacement acts when it is read.
      long leftMs = !row.isNullAt(replace) && row.getBoolean(replace) ? 0 : Math.max(row.getLong(at), nowMs) - nowMs;
      long wait = Math.min(leftMs, LATEST_NANOS / 1_000_000 * WAIT_SHARE) * 1_000_000 / WAIT_SHARE;
      long leave = Math.max(System.nanoTime() + Math.max(wait, GATHER_NANOS), sentNanos + INTERVAL_NANOS);
      if (rows++ == 0 || leave < leaveNanos) {
        leaveNanos = leave;
        notifyAll();
      }
      if (rows >= ROWS_MAX || bytes >= BYTES_MAX) {
        send();
      }
      return nowMs - row.getLong(ts) > FRESH_MS ? 0 : Math.min(leftMs / REST_SHARE, REST_MS_MAX);
    }

    /** Ends the connection; {@code complete} sends the last frame, and waits until the bridge has stored all rows. */
    void end(boolean complete) throws IOException {
      try {
        synchronized (this) {
          if (complete) {
            check();
            send();
          }
          ended = true;
          notifyAll();
        }
        if (complete) {
          write(ByteBuffer.wrap(new byte[4]));
          if (channel.read(ByteBuffer.allocate(1)) != 1) {
            throw new IOException("the connection ended before the bridge had stored all");
          }
        }
      } finally {
        synchronized (this) {
          ended = true;
          channel.close();
          root.close();
          allocator.close();
        }
      }
    }

    private void check() throws IOException {
      if (failure != null) {
        throw failure;
      }
    }

    private synchronized void flushInTime() {
      try {
        while (!ended) {
          if (rows == 0) {
            wait();
            continue;
          }
          long left = leaveNanos - System.nanoTime();
          if (left > 0) {
            wait(left / 1_000_000, (int) (left % 1_000_000));
          } else {
            send();
          }
        }
      } catch (IOException e) {
        failure = e;
      } catch (InterruptedException | RuntimeException | Error e) {
        failure = new IOException("frames cannot be sent", e);
      }
    }

    private void send() throws IOException {
      if (rows == 0) {
        return;
      }
      root.setRowCount(rows);
      ByteArrayOutputStream frame = new ByteArrayOutputStream((int) Math.min(bytes + 64L * rows + 4096, 1 << 26));
      try (ArrowRecordBatch batch = new VectorUnloader(root).getRecordBatch()) {
        MessageSerializer.serialize(new WriteChannel(Channels.newChannel(frame)), batch);
      }
      ByteBuffer length = ByteBuffer.allocate(4).putInt(frame.size()).flip();
      write(length);
      write(ByteBuffer.wrap(frame.toByteArray()));
      if (bytes > 4 * BYTES_MAX) { // one large record must not keep its memory
        root.clear();
        root.allocateNew();
      } else {
        for (FieldVector vector : root.getFieldVectors()) {
          vector.reset();
        }
      }
      rows = 0;
      bytes = 0;
      sentNanos = System.nanoTime();
    }

    private void write(ByteBuffer data) throws IOException {
      while (data.hasRemaining()) {
        channel.write(data);
      }
    }
  }

  /** Puts one column's value of a row into its vector; returns its size in bytes. */
  private interface Setter {
    int set(int index, Row row);
  }

  private static Setter setter(FieldVector vector, int column) {
    if (vector instanceof VarCharVector strings) {
      return (index, row) -> {
        if (row.isNullAt(column)) {
          strings.setNull(index);
          return 0;
        }
        byte[] text = row.getString(column).getBytes(StandardCharsets.UTF_8);
        strings.setSafe(index, text);
        return text.length;
      };
    }
    if (vector instanceof VarBinaryVector values) {
      return (index, row) -> {
        if (row.isNullAt(column)) {
          values.setNull(index);
          return 0;
        }
        byte[] value = (byte[]) row.get(column);
        values.setSafe(index, value);
        return value.length;
      };
    }
    if (vector instanceof ListVector headers) {
      return (index, row) -> {
        if (row.isNullAt(column)) {
          headers.setNull(index);
          return 0;
        }
        return setHeaders(headers, index, row.getList(column));
      };
    }
    return (index, row) -> {
      if (row.isNullAt(column)) {
        vector.setNull(index);
      } else {
        setNumber(vector, index, row.get(column));
      }
      return 8;
    };
  }

  private static int setHeaders(ListVector vector, int index, java.util.List<Row> headers) {
    StructVector structs = (StructVector) vector.getDataVector();
    VarCharVector names = (VarCharVector) structs.getChildByOrdinal(0);
    VarBinaryVector values = (VarBinaryVector) structs.getChildByOrdinal(1);
    int at = vector.startNewValue(index);
    int size = 0;
    for (Row header : headers) {
      byte[] name = header.getString(0).getBytes(StandardCharsets.UTF_8);
      names.setSafe(at, name);
      size += name.length + 8;
      if (header.isNullAt(1)) {
        values.setNull(at);
      } else {
        byte[] value = (byte[]) header.get(1);
        values.setSafe(at, value);
        size += value.length;
      }
      structs.setIndexDefined(at++);
    }
    vector.endValue(index, headers.size());
    return size;
  }

  private static void setNumber(FieldVector vector, int index, Object value) {
    if (vector instanceof BigIntVector longs) {
      longs.setSafe(index, (Long) value);
    } else if (vector instanceof IntVector ints) {
      ints.setSafe(index, (Integer) value);
    } else if (vector instanceof SmallIntVector shorts) {
      shorts.setSafe(index, (Short) value);
    } else if (vector instanceof TinyIntVector bytes) {
      bytes.setSafe(index, (Byte) value);
    } else if (vector instanceof BitVector bits) {
      bits.setSafe(index, (Boolean) value ? 1 : 0);
    } else {
      throw new IllegalArgumentException("no column of a frame can be of the type " + vector.getField());
    }
  }
}
