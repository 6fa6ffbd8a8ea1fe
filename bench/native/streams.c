/* Many streams at a set pace: how long each chunk was under way, and how evenly they came. */
#define _GNU_SOURCE
#include "loop.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

/* --- counting: histograms of microseconds, in steps of 10 to 1 s */

#define STEPS 100000
struct histogram {
    uint64_t count[STEPS + 1], total;
};
static struct histogram delays, gaps;

static void add(struct histogram *h, int64_t ns) {
    uint64_t step = ns < 0 ? 0 : ns / 10000;
    h->count[step > STEPS ? STEPS : step]++;
    h->total++;
}

static double quantile_ms(struct histogram *h, double share) {
    uint64_t want = h->total * share, seen = 0;
    for (int i = 0; i <= STEPS; i++)
        if ((seen += h->count[i]) > want) return (i + 0.5) / 100;
    return -1;
}

static void show(const char *name, struct histogram *h) {
    printf("\"%s_ms\":{\"p50\":%.2f,\"p99\":%.2f,\"p999\":%.2f,\"max\":%.2f},", name, quantile_ms(h, .5), quantile_ms(h, .99),
           quantile_ms(h, .999), quantile_ms(h, 1 - 1e-12));
}

static int measuring;
static uint64_t chunks, bytes_read;

/* A stream's client: counts chunks by their marks, wherever reads cut them. */
static void count_chunks(struct client *c, const char *at, size_t bytes) {
    const char *end = at + bytes;
    while (at < end) {
        if (!c->digits) {
            at = memchr(at, MARK, end - at);
            if (!at) return;
            at++, c->digits = 16, c->stamp = 0;
        }
        for (; c->digits && at < end; at++, c->digits--) c->stamp = c->stamp * 16 + (*at <= '9' ? *at - '0' : *at - 'a' + 10);
        if (c->digits) return;
        if (measuring && !c->slow) {
            chunks++;
            add(&delays, now_ns - c->stamp);
            if (c->last_read) add(&gaps, llabs((int64_t)(now_ns - c->last_read) - (int64_t)(c->stamp - c->last_written)));
        }
        c->last_read = now_ns, c->last_written = c->stamp;
    }
}

static void on_stream(struct source *source, uint32_t events) {
    struct client *c = (struct client *)source;
    if (!c->begun) {
        if (!(events & EPOLLOUT)) return leave(c), (void)run.failed++;
        char body[256];
        int n = sprintf(body, "{\"model\":\"m\",\"stream\":true,\"max_tokens\":4096,\"messages\":[{\"role\":\"user\",\"content\":\"%s question %d\"}]}",
                        c->slow ? SLOW : "", (int)(c - run.all));
        c->begun = 1;
        rewatch(source, EPOLLIN);
        if (ask(c, body, n)) leave(c), run.failed++;
        return;
    }
    ssize_t n = read(source->fd, buffer, sizeof buffer);
    if (n <= 0) {
        if (n < 0 && errno == EAGAIN) return;
        run.failed += !c->stamp || measuring;
        return leave(c);
    }
    now_ns = clock_ns();
    if (!c->got_head) {
        c->got_head = 1, run.waiting--;
        if (memcmp(buffer, "HTTP/1.1 200", 12)) fprintf(stderr, "answered %.*s\n", (int)n, buffer), run.failed++;
    }
    if (measuring && !c->slow) bytes_read += n;
    count_chunks(c, buffer, n);
    if (c->slow) epoll_ctl(loop, EPOLL_CTL_DEL, source->fd, NULL);
    else if (n >= 5 && !memcmp(buffer + n - 5, "0\r\n\r\n", 5)) leave(c);
}

/* While streams are joining they are slow: a gateway that can't carry all of them can take them all the same. */
#define JOINING_US 500000

void streams(int port, int count, long interval_us, int chunk_bytes, double seconds, int slow, int slow_bytes) {
    engine_pace(JOINING_US, chunk_bytes, slow_bytes);
    begin(port, count);
    uint64_t slow_first = engine_counts.slow_bytes;
    chunks = bytes_read = 0;
    uint64_t patience = clock_ns() + 60000000000ull;
    for (int i = 0; i < count && clock_ns() < patience;) {
        if (run.waiting < 128) join(i, on_stream, i >= count - slow), i++;
        else turn(1);
    }
    while (run.waiting && clock_ns() < patience) turn(10);
    engine_pace(interval_us, chunk_bytes, slow_bytes);
    turns(1.5); /* every stream at its pace */
    memset(&delays, 0, sizeof delays), memset(&gaps, 0, sizeof gaps);
    int begun = run.open;
    struct counts before = engine_counts;
    uint64_t cpu = cpu_ns(), from = clock_ns();
    measuring = 1;
    puts("{\"event\":\"begin\"}"), fflush(stdout);
    turns(seconds * .75);
    uint64_t slow_before_last = engine_counts.slow_bytes;
    turns(seconds * .25);
    measuring = 0;
    double wall = (clock_ns() - from) / 1e9, busy = (cpu_ns() - cpu) / 1e9 / wall;
    printf("{\"event\":\"end\",\"streams\":%d,\"failed\":%d,\"seconds\":%.4f,\"planned\":%.0f,\"written\":%llu,\"blocked\":%llu,\"read\":%llu,\"bytes\":%llu,"
           "\"slow_bytes\":%llu,\"slow_bytes_last_quarter\":%llu,", begun, run.failed + count - begun, wall, (begun - slow) * wall * 1e6 / interval_us,
           (unsigned long long)(engine_counts.written - before.written), (unsigned long long)(engine_counts.blocked - before.blocked),
           (unsigned long long)chunks, (unsigned long long)bytes_read, (unsigned long long)(engine_counts.slow_bytes - slow_first), (unsigned long long)(engine_counts.slow_bytes - slow_before_last));
    show("delay", &delays), show("gap", &gaps);
    printf("\"generator_cpu\":%.3f}\n", busy), fflush(stdout);
    engine_end();
    for (int i = count - slow; i < count; i++) leave(&run.all[i]);
    for (uint64_t end = clock_ns() + 15000000000ull; run.open && clock_ns() < end;) turn(10);
    for (int i = 0; i < count; i++) leave(&run.all[i]);
    turns(0.5);
    free(run.all);
    puts("{\"event\":\"done\"}"), fflush(stdout);
}
