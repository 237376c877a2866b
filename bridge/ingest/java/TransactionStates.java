package delaybridge;

import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ExecutionException;

import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.DescribeTransactionsOptions;
import org.apache.kafka.clients.admin.DescribeTransactionsResult;
import org.apache.kafka.common.errors.TransactionalIdNotFoundException;
import org.apache.kafka.common.errors.UnsupportedVersionException;

/**
 * Asks the coordinators of transactional ids for the states of their transactions (KIP-664). Properties are on standard
 * input, in the form of ClientProbe. The arguments are the time-out in milliseconds and the ids. Prints one state a
 * line, "-" for an id that the coordinator does not know; or, with exit status 1, the reason of a missing answer.
 */
public final class TransactionStates {
    private TransactionStates() {
    }

    public static void main(String[] arguments) throws Exception {
        String[] parts = new String(System.in.readAllBytes(), StandardCharsets.UTF_8).split("\0", -1);
        Map<String, Object> properties = new HashMap<>();
        for (int i = 0; i + 1 < parts.length; i += 2) {
            properties.put(parts[i], parts[i + 1]);
        }
        List<String> names = List.of(arguments).subList(1, arguments.length);
        StringBuilder answer = new StringBuilder();
        int status = 0;
        try {
            Admin admin = Admin.create(properties);
            DescribeTransactionsOptions options = new DescribeTransactionsOptions().timeoutMs(Integer.parseInt(arguments[0]));
            DescribeTransactionsResult result = admin.describeTransactions(names, options);
            for (String name : names) {
                answer.append(state(result, name)).append('\n');
            }
        } catch (Exception failure) {
            answer.setLength(0);
            answer.append(failure.getCause() == null ? failure : failure.getCause());
            status = 1;
        }
        System.out.print(answer);
        System.out.flush();
        Runtime.getRuntime().halt(status);
    }

    private static String state(DescribeTransactionsResult result, String name) throws Exception {
        try {
            return result.description(name).get().state().toString();
        } catch (ExecutionException failure) {
            if (failure.getCause() instanceof TransactionalIdNotFoundException
                    || failure.getCause() instanceof UnsupportedVersionException) {
                return "-";
            }
            throw failure;
        }
    }
}
