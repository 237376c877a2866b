import java.lang.reflect.Field;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.TreeMap;

import org.apache.kafka.clients.admin.AdminClientConfig;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.clients.producer.ProducerConfig;
import org.apache.kafka.common.config.ConfigDef;
import org.apache.kafka.common.config.types.Password;

/** Properties of the Java clients: all names and types; and the consumer's reading of names and values (stdin, NUL). */
public final class ConfigTable {
    public static void main(String[] arguments) throws Exception {
        Field producer = ProducerConfig.class.getDeclaredField("CONFIG");
        producer.setAccessible(true);
        Map<String, ConfigDef.ConfigKey> all = new TreeMap<>();
        all.putAll(((ConfigDef) producer.get(null)).configKeys());
        all.putAll(AdminClientConfig.configDef().configKeys());
        all.putAll(ConsumerConfig.configDef().configKeys());
        all.forEach((name, key) -> System.out.println("name " + name + " " + key.type));
        String[] parts = new String(System.in.readAllBytes(), StandardCharsets.UTF_8).split("\0", -1);
        for (int i = 0; i + 1 < parts.length; i += 2) {
            ConfigDef.ConfigKey key = all.get(parts[i]);
            try {
                Object read = ConfigDef.parseType(parts[i], parts[i + 1], key.type);
                if (key.validator != null) {
                    key.validator.ensureValid(parts[i], read);
                }
                System.out.println("read " + (read instanceof Password ? ((Password) read).value() : read));
            } catch (Exception refused) {
                System.out.println("refused");
            }
        }
    }
}
