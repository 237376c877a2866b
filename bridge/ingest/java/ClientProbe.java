package delaybridge;

import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Map;

import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.DescribeClusterOptions;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/**
 * Makes the clients of Spark's source, and asks the brokers through one of them. Properties are on standard input,
 * names and values with NUL behind each: they hold secrets, and a command line is public. The argument is the time-out
 * in milliseconds. A failure is printed, one cause a line, with exit status 1.
 */
public final class ClientProbe {
    private ClientProbe() {
    }

    public static void main(String[] arguments) throws Exception {
        String[] parts = new String(System.in.readAllBytes(), StandardCharsets.UTF_8).split("\0", -1);
        Map<String, Object> properties = new HashMap<>();
        for (int i = 0; i + 1 < parts.length; i += 2) {
            properties.put(parts[i], parts[i + 1]);
        }
        int timeoutMs = Integer.parseInt(arguments[0]);
        try {
            new KafkaConsumer<>(properties, new ByteArrayDeserializer(), new ByteArrayDeserializer()).close();
            try (Admin admin = Admin.create(properties)) {
                admin.describeCluster(new DescribeClusterOptions().timeoutMs(timeoutMs)).clusterId().get();
            }
        } catch (Exception failure) {
            for (Throwable cause = failure; cause != null; cause = cause.getCause()) {
                System.out.println(cause.getClass().getSimpleName() + ": " + cause.getMessage());
            }
            System.exit(1);
        }
        System.exit(0);
    }
}
