/* librdkafka waits with C11's cnd_timedwait until a time of the wall clock. libfaketime leaves that function alone, so
 * its deadline would be of the faked clock and its wait of the true one. This makes it what the kernel's is: it lasts
 * until the (faked) wall clock has come to the deadline, however that clock is set meanwhile.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/syscall.h>
#include <threads.h>
#include <time.h>
#include <unistd.h>

static const long long SLICE_NS = 50000000, SECOND_NS = 1000000000;

static long long ns(const struct timespec *t) { return t->tv_sec * SECOND_NS + t->tv_nsec; }

int cnd_timedwait(cnd_t *condition, mtx_t *mutex, const struct timespec *deadline) {
    static int (*real)(cnd_t *, mtx_t *, const struct timespec *);
    if (!real) real = (int (*)(cnd_t *, mtx_t *, const struct timespec *))dlsym(RTLD_NEXT, "cnd_timedwait");
    for (;;) {
        struct timespec faked, true_time;
        clock_gettime(CLOCK_REALTIME, &faked);
        long long left = ns(deadline) - ns(&faked);
        if (left < 0) left = 0;
        syscall(SYS_clock_gettime, CLOCK_REALTIME, &true_time);
        long long until = ns(&true_time) + (left < SLICE_NS ? left : SLICE_NS);
        struct timespec slice = {until / SECOND_NS, until % SECOND_NS};
        int result = real(condition, mutex, &slice);
        if (result != thrd_timedout || left <= SLICE_NS) return result;
    }
}
