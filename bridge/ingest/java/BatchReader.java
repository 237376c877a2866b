package delaybridge;

import java.io.BufferedOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.nio.BufferUnderflowException;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.TimeUnit;

import org.apache.kafka.clients.ApiVersions;
import org.apache.kafka.clients.ClientResponse;
import org.apache.kafka.clients.ClientUtils;
import org.apache.kafka.clients.DefaultHostResolver;
import org.apache.kafka.clients.ManualMetadataUpdater;
import org.apache.kafka.clients.NetworkClient;
import org.apache.kafka.clients.NetworkClientUtils;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AdminClientConfig;
import org.apache.kafka.common.IsolationLevel;
import org.apache.kafka.common.Node;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.errors.CorruptRecordException;
import org.apache.kafka.common.errors.OffsetOutOfRangeException;
import org.apache.kafka.common.message.FetchResponseData;
import org.apache.kafka.common.metrics.Metrics;
import org.apache.kafka.common.protocol.Errors;
import org.apache.kafka.common.record.ControlRecordType;
import org.apache.kafka.common.record.DefaultRecordBatch;
import org.apache.kafka.common.record.MemoryRecords;
import org.apache.kafka.common.record.Record;
import org.apache.kafka.common.record.RecordBatch;
import org.apache.kafka.common.record.TimestampType;
import org.apache.kafka.common.requests.FetchRequest;
import org.apache.kafka.common.requests.FetchResponse;
import org.apache.kafka.common.utils.BufferSupplier;
import org.apache.kafka.common.utils.ByteUtils;
import org.apache.kafka.common.utils.LogContext;
import org.apache.kafka.common.utils.Time;

/**
 * Reads stretches of partitions batch by batch, in a separate process, with memory for one compressed batch and one
 * record. Kafka's consumers unpack a batch before they know its size; this reader counts first.
 *
 * <p>Standard input: the client's properties, the largest record in bytes, and the stretches; it stays open while the
 * answer is wanted. Standard output, of each stretch in turn, numbers big-endian:
 *
 * <pre>
 *   R offset ts byBroker key value count (name value)*   a committed record
 *   L offset ts byBroker size                            a record above the limit
 *   C offset next reason                                 an unreadable batch; it ends the stretch
 *   E end                                                the stretch is read up to here
 *   G offset                                             the log does not have this offset; it ends the stretch
 *   F reason                                             a failure of the brokers, or of this process
 * </pre>
 */
public final class BatchReader {
  private static final short FETCH_VERSION_MAX = 12; // later ones name topics by their ids
  private static final int FETCH_BYTES = 1 << 20;
  private static final int FETCH_BYTES_MAX = 1 << 26;
  private static final int WAIT_MS = 500;
  private static final int CALL_MS = 10_000;
  private static final int ATTEMPTS = 5;
  private static final long PAUSE_MS = 500;
  private static final long HEADER_BYTES = 100; // of a header in memory, beside its name and value

  private final DataOutputStream out;
  private final Admin admin;
  private final NetworkClient client;
  private final ManualMetadataUpdater nodes = new ManualMetadataUpdater();
  private final int recordBytesMax;

  private BatchReader(Map<String, Object> properties, int recordBytesMax, DataOutputStream out) {
    this.out = out;
    this.recordBytesMax = recordBytesMax;
    AdminClientConfig config = new AdminClientConfig(properties);
    admin = Admin.create(properties);
    client = ClientUtils.createNetworkClient(config, "batches", new Metrics(), "batches", new LogContext(), new ApiVersions(),
        Time.SYSTEM, 1, CALL_MS + WAIT_MS, nodes, new DefaultHostResolver());
  }

  public static void main(String[] arguments) throws IOException {
    DataOutputStream out = new DataOutputStream(new BufferedOutputStream(new FileOutputStream(FileDescriptor.out), 1 << 16));
    System.setOut(System.err); // output of libraries is no answer
    DataInputStream in = new DataInputStream(System.in);
    Map<String, Object> properties = new HashMap<>();
    for (int left = in.readInt(); left > 0; left--) {
      properties.put(text(in), text(in));
    }
    int recordBytesMax = in.readInt();
    List<Stretch> stretches = new ArrayList<>();
    for (int left = in.readInt(); left > 0; left--) {
      stretches.add(new Stretch(new TopicPartition(text(in), in.readInt()), in.readLong(), in.readLong()));
    }
    Thread parent = new Thread(() -> awaitEnd(in), "parent");
    parent.setDaemon(true);
    parent.start();
    int status = 0;
    try {
      BatchReader reader = new BatchReader(properties, recordBytesMax, out);
      for (Stretch stretch : stretches) {
        reader.read(stretch);
        out.flush();
      }
    } catch (Exception e) {
      out.writeByte('F');
      write(out, String.valueOf(e).getBytes(StandardCharsets.UTF_8));
      out.flush();
      status = 1;
    } catch (Error e) { // perhaps no memory: the batch is the reason, not the brokers
      status = 3;
    }
    Runtime.getRuntime().halt(status);
  }

  private record Stretch(TopicPartition partition, long begin, long end) {}

  private static void awaitEnd(InputStream in) {
    try {
      in.read();
    } catch (IOException e) {
      // as at its end
    }
    Runtime.getRuntime().halt(2);
  }

  private static String text(DataInputStream in) throws IOException {
    byte[] bytes = new byte[in.readInt()];
    in.readFully(bytes);
    return new String(bytes, StandardCharsets.UTF_8);
  }

  private void read(Stretch stretch) throws Exception {
    long at = stretch.begin;
    long end = stretch.end;
    int bytes = FETCH_BYTES;
    for (int vain = 0; at < end && vain < ATTEMPTS; vain++) {
      FetchResponseData.PartitionData answer;
      try {
        answer = fetch(stretch.partition, at, bytes);
      } catch (CorruptRecordException e) { // the broker's verdict on its own file
        corrupt(at, at + 1, String.valueOf(e.getMessage()));
        return;
      } catch (OffsetOutOfRangeException e) {
        out.writeByte('G');
        out.writeLong(at);
        return;
      }
      long stable = answer.lastStableOffset();
      end = Math.min(end, stable);
      MemoryRecords records = (MemoryRecords) FetchResponse.recordsOrFail(answer);
      List<DefaultRecordBatch> batches = new ArrayList<>();
      String garbled = null; // the reason why no batch follows them
      try {
        records.batches().forEach(batch -> batches.add((DefaultRecordBatch) batch));
      } catch (CorruptRecordException | ClassCastException e) { // a length, or a version, that no batch has
        garbled = String.valueOf(e.getMessage());
      }
      if (batches.isEmpty() && at < end && garbled == null && records.sizeInBytes() > 0) {
        if (bytes < FETCH_BYTES_MAX) {
          bytes *= 4;
          vain = -1;
          continue;
        }
        garbled = "it is longer than all that is there";
      }
      if (batches.isEmpty() && at < end && garbled != null) {
        corrupt(at, behind(records.buffer(), at, stable), garbled);
        return;
      }
      if (batches.isEmpty() && at < end) {
        Thread.sleep(PAUSE_MS); // no answer below the stable end: remote storage was too slow for the broker
      }
      long before = at;
      Transactions transactions = new Transactions(answer.abortedTransactions());
      for (int i = 0; i < batches.size() && at < end; i++) {
        DefaultRecordBatch batch = batches.get(i);
        String damage = damage(batch);
        if (damage != null && garbled == null && i + 1 == batches.size() && bytes < FETCH_BYTES_MAX) {
          bytes *= 4; // up to the next batch: this one does not tell its own end
          vain = -1;
          break;
        }
        if (damage != null) {
          long first = batch.baseOffset();
          long next = i + 1 < batches.size() ? batches.get(i + 1).baseOffset() : garbled == null ? stable : first + 1;
          corrupt(first, next > first && next <= stable ? next : first + 1, damage);
          return;
        }
        if (batch.lastOffset() < at) {
          continue;
        }
        String unreadable = transactions.leaveOut(batch) ? null : records(batch, at);
        if (unreadable != null) {
          corrupt(batch.baseOffset(), batch.lastOffset() + 1, unreadable);
          return;
        }
        at = batch.lastOffset() + 1;
      }
      if (at > before) {
        vain = -1;
      }
      out.flush();
    }
    out.writeByte('E');
    out.writeLong(at);
  }

  /** The end of a batch with a wrong length, from its other fields, if they agree. */
  private static long behind(ByteBuffer records, long at, long stable) {
    int begin = records.position();
    if (records.remaining() < DefaultRecordBatch.RECORD_BATCH_OVERHEAD) {
      return at + 1;
    }
    long last = records.getLong(begin) + records.getInt(begin + DefaultRecordBatch.LAST_OFFSET_DELTA_OFFSET);
    int count = records.getInt(begin + DefaultRecordBatch.RECORDS_COUNT_OFFSET);
    return last >= at && last < stable && count == last - records.getLong(begin) + 1 ? last + 1 : at + 1;
  }

  private void corrupt(long offset, long next, String reason) throws IOException {
    out.writeByte('C');
    out.writeLong(offset);
    out.writeLong(next);
    write(out, reason.getBytes(StandardCharsets.UTF_8));
  }

  private static String damage(DefaultRecordBatch batch) {
    try {
      batch.ensureValid();
      return null;
    } catch (RuntimeException e) {
      return String.valueOf(e.getMessage());
    }
  }

  /** Recognises markers, and batches of aborted transactions, in an answer. */
  private static final class Transactions {
    private final List<FetchResponseData.AbortedTransaction> coming = new ArrayList<>();
    private final Set<Long> aborted = new HashSet<>();

    Transactions(List<FetchResponseData.AbortedTransaction> ofAnswer) {
      if (ofAnswer != null) {
        coming.addAll(ofAnswer);
      }
    }

    boolean leaveOut(DefaultRecordBatch batch) {
      for (Iterator<FetchResponseData.AbortedTransaction> each = coming.iterator(); each.hasNext(); ) {
        FetchResponseData.AbortedTransaction transaction = each.next();
        if (transaction.firstOffset() <= batch.lastOffset()) {
          aborted.add(transaction.producerId());
          each.remove();
        }
      }
      if (batch.isControlBatch()) {
        Iterator<Record> markers = batch.iterator();
        if (markers.hasNext() && ControlRecordType.parse(markers.next().key()) == ControlRecordType.ABORT) {
          aborted.remove(batch.producerId());
        }
        return true;
      }
      return batch.isTransactional() && aborted.contains(batch.producerId());
    }
  }

  /** Writes the records from {@code at} on; returns the reason of an unreadable one. */
  private String records(DefaultRecordBatch batch, long at) throws IOException {
    boolean byBroker = batch.timestampType() == TimestampType.LOG_APPEND_TIME;
    InputStream in;
    int left = batch.countOrNull();
    try {
      in = batch.recordInputStream(BufferSupplier.NO_CACHING);
    } catch (RuntimeException | OutOfMemoryError e) {
      return String.valueOf(e);
    }
    for (; left > 0; left--) {
      int size;
      long ts;
      long offset;
      ByteBuffer body = null;
      try {
        size = ByteUtils.readVarint(in);
        in.skipNBytes(1);
        long delta = ByteUtils.readVarlong(in);
        int offsetDelta = ByteUtils.readVarint(in);
        ts = byBroker ? batch.maxTimestamp() : batch.baseTimestamp() + delta;
        offset = batch.baseOffset() + offsetDelta;
        int rest = size - 1 - ByteUtils.sizeOfVarlong(delta) - ByteUtils.sizeOfVarint(offsetDelta);
        if (size > recordBytesMax || offset < at) {
          in.skipNBytes(rest);
        } else {
          body = ByteBuffer.wrap(in.readNBytes(rest));
        }
      } catch (IOException | RuntimeException | OutOfMemoryError e) {
        return String.valueOf(e);
      }
      if (offset < at) {
        continue;
      }
      try {
        if (body == null) {
          writeLarge(offset, ts, byBroker, size);
        } else {
          write(body, size, offset, ts, byBroker);
        }
      } catch (BufferUnderflowException | IllegalArgumentException e) {
        return "the record at offset " + offset + " cannot be understood";
      }
    }
    return null;
  }

  private void writeLarge(long offset, long ts, boolean byBroker, long size) throws IOException {
    out.writeByte('L');
    writePlace(offset, ts, byBroker);
    out.writeLong(size);
  }

  private void writePlace(long offset, long ts, boolean byBroker) throws IOException {
    out.writeLong(offset);
    out.writeLong(ts);
    out.writeBoolean(byBroker);
  }

  private void write(ByteBuffer body, int size, long offset, long ts, boolean byBroker) throws IOException {
    byte[] key = field(body);
    byte[] value = field(body);
    int count = ByteUtils.readVarint(body);
    if (count < 0 || count > body.remaining()) {
      throw new IllegalArgumentException("headers");
    }
    long held = size + HEADER_BYTES * count; // each of them may be two bytes here, and is an object where it is read
    if (held > recordBytesMax) {
      writeLarge(offset, ts, byBroker, held);
      return;
    }
    List<byte[]> headers = new ArrayList<>();
    for (int i = 0; i < count; i++) {
      byte[] name = field(body);
      // Like every Java client: invalid UTF-8 in names is replaced.
      headers.add(new String(name == null ? new byte[0] : name, StandardCharsets.UTF_8).getBytes(StandardCharsets.UTF_8));
      headers.add(field(body));
    }
    out.writeByte('R');
    writePlace(offset, ts, byBroker);
    write(out, key);
    write(out, value);
    out.writeInt(count);
    for (byte[] each : headers) {
      write(out, each);
    }
  }

  private static byte[] field(ByteBuffer body) {
    int size = ByteUtils.readVarint(body);
    if (size < 0) {
      return null;
    }
    if (size > body.remaining()) {
      throw new BufferUnderflowException();
    }
    byte[] bytes = new byte[size];
    body.get(bytes);
    return bytes;
  }

  private static void write(DataOutputStream out, byte[] bytes) throws IOException {
    out.writeInt(bytes == null ? -1 : bytes.length);
    if (bytes != null) {
      out.write(bytes);
    }
  }

  private FetchResponseData.PartitionData fetch(TopicPartition partition, long offset, int bytes) throws Exception {
    Exception failure = null;
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
      try {
        FetchResponseData.PartitionData answer = ask(leader(partition), partition, offset, bytes);
        Errors error = Errors.forCode(answer.errorCode());
        if (error == Errors.NONE) {
          return answer;
        }
        failure = error.exception();
      } catch (IOException e) {
        failure = e;
      }
      leaders.remove(partition);
      Thread.sleep(PAUSE_MS);
    }
    throw failure;
  }

  private final Map<TopicPartition, Node> leaders = new HashMap<>();

  private Node leader(TopicPartition partition) throws Exception {
    Node known = leaders.get(partition);
    if (known != null) {
      return known;
    }
    Node found = admin.describeTopics(List.of(partition.topic())).allTopicNames().get(CALL_MS, TimeUnit.MILLISECONDS)
        .get(partition.topic()).partitions().get(partition.partition()).leader();
    if (found == null || found.isEmpty()) {
      throw new IOException("no leader for " + partition);
    }
    leaders.put(partition, found);
    nodes.setNodes(new ArrayList<>(leaders.values()));
    return found;
  }

  private FetchResponseData.PartitionData ask(Node node, TopicPartition partition, long offset, int bytes)
      throws IOException {
    if (!NetworkClientUtils.awaitReady(client, node, Time.SYSTEM, CALL_MS)) {
      throw new IOException("no connection to " + node);
    }
    FetchRequest.Builder request = FetchRequest.Builder.forConsumer(FETCH_VERSION_MAX, WAIT_MS, 1,
        Map.of(partition, new FetchRequest.PartitionData(Uuid.ZERO_UUID, offset, -1, bytes, Optional.empty())));
    request.isolationLevel(IsolationLevel.READ_COMMITTED).setMaxBytes(bytes);
    ClientResponse response = NetworkClientUtils.sendAndReceive(
        client, client.newClientRequest(node.idString(), request, Time.SYSTEM.milliseconds(), true), Time.SYSTEM);
    FetchResponse fetched = (FetchResponse) response.responseBody();
    FetchResponseData.PartitionData answer =
        fetched.responseData(Map.of(), response.requestHeader().apiVersion()).get(partition);
    if (answer == null) {
      throw new IOException("no answer about " + partition + ": " + fetched.error());
    }
    return answer;
  }
}
