/* librdkafka waits with C11's cnd_timedwait until a time of the wall clock. libfaketime leaves that function alone, so
 * its deadline would be of the faked clock and its wait of the true one. This makes it what the kernel's is: it lasts
 * until it is signalled, or until the (faked) wall clock has come to the deadline, however that clock is set meanwhile.
 *
 * Whoever waits waits without a limit, and a thread that looks at the clock wakes those whose time has come. (To wait
 * for a short while again and again would lose the signal that comes just as such a while is over.)
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/syscall.h>
#include <threads.h>
#include <time.h>
#include <unistd.h>

struct waiting {
    cnd_t *condition;
    const struct timespec *deadline;
    struct waiting *next;
};

static const struct timespec LOOK = {0, 10 * 1000 * 1000};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct waiting *all;

static int is_over(const struct timespec *deadline) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec > deadline->tv_sec || (now.tv_sec == deadline->tv_sec && now.tv_nsec >= deadline->tv_nsec);
}

/* A condition is alive while its waiter is listed. One that is not waiting yet is woken at the next look. */
static void *watch(void *unused) {
    for (;;) {
        syscall(SYS_nanosleep, &LOOK, NULL);
        pthread_mutex_lock(&lock);
        for (struct waiting *one = all; one; one = one->next)
            if (is_over(one->deadline)) cnd_broadcast(one->condition);
        pthread_mutex_unlock(&lock);
    }
    return unused;
}

static void begin(void) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, watch, NULL) == 0) pthread_detach(thread);
}

int cnd_timedwait(cnd_t *condition, mtx_t *mutex, const struct timespec *deadline) {
    if (is_over(deadline)) return thrd_timedout;
    pthread_once(&once, begin);
    struct waiting self = {condition, deadline, NULL};
    pthread_mutex_lock(&lock);
    self.next = all;
    all = &self;
    pthread_mutex_unlock(&lock);
    int result = cnd_wait(condition, mutex);
    pthread_mutex_lock(&lock);
    struct waiting **place = &all;
    while (*place != &self) place = &(*place)->next;
    *place = self.next;
    pthread_mutex_unlock(&lock);
    return result == thrd_success && is_over(deadline) ? thrd_timedout : result;
}
