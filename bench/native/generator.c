/* Load for a gateway, engine and clients in one thread, so that the clocks at both ends of a chunk are the same one.

   Prints the engine's two ports, then takes commands on standard input, one a line, and answers each with lines of JSON:

     streams PORT COUNT INTERVAL_US CHUNK_BYTES SECONDS SLOW SLOW_CHUNK_BYTES
         COUNT endless streams; the last SLOW of them stop reading after their first chunk, and their chunks are of another
         size. {"event":"begin"} and {"event":"end"} enclose the window that is measured.

   Why C: one core must write and read as many chunks a second as a gateway carries on another one. Engine and clients on
   uvloop end at 41,000, these at 66,000 in the same minutes; wrk and h2load neither pace streams nor read a chunk's mark.  */
#define _GNU_SOURCE
#include "loop.h"
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

int loop;
uint64_t now_ns;
char buffer[1 << 18];

void *need(void *got) {
    if (!got) fputs("out of memory\n", stderr), exit(1);
    return got;
}

uint64_t clock_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

uint64_t cpu_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void control(struct source *source, uint32_t events, int how) {
    struct epoll_event event = {.events = events, .data.ptr = source};
    epoll_ctl(loop, how, source->fd, &event);
}
void watch(struct source *source, uint32_t events) { control(source, events, EPOLL_CTL_ADD); }
void rewatch(struct source *source, uint32_t events) { control(source, events, EPOLL_CTL_MOD); }

/* --- clients */

struct clients run;

static int dial(int port, int number, int small_buffer) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1, small = 4096;
    /* Eight source addresses: one has 28,000 ports, and those just closed wait a minute. */
    struct sockaddr_in from = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1 + number % 8)};
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (fd < 0) return -1;
    setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &one, sizeof one);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (small_buffer) setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    bind(fd, (struct sockaddr *)&from, sizeof from);
    if (connect(fd, (struct sockaddr *)&to, sizeof to) && errno != EINPROGRESS) return close(fd), -1;
    return fd;
}

void leave(struct client *c) {
    if (c->source.fd < 0) return;
    close(c->source.fd);
    c->source.fd = -1;
    run.open--;
    run.waiting -= !c->got_head;
}

int ask(struct client *c, const char *body, size_t bytes) {
    char head[256];
    int n = snprintf(head, sizeof head, "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n", bytes);
    char *both = need(malloc(n + bytes));
    memcpy(both, head, n);
    memcpy(both + n, body, bytes);
    size_t sent = 0;
    while (sent < n + bytes) { /* a loopback socket takes a body at once, or nearly */
        ssize_t w = write(c->source.fd, both + sent, n + bytes - sent);
        if (w < 0 && errno != EAGAIN) break;
        sent += w > 0 ? w : 0;
    }
    free(both);
    return sent == n + bytes ? 0 : -1;
}

void begin(int port, int count) {
    memset(&run, 0, sizeof run);
    run.port = port, run.count = count;
    run.all = need(calloc(count, sizeof *run.all));
    for (int i = 0; i < count; i++) run.all[i].source.fd = -1;
}

int join(int number, void (*ready)(struct source *, uint32_t), int slow) {
    struct client *c = &run.all[number];
    c->source = (struct source){ready, dial(run.port, number, slow)};
    c->slow = slow;
    if (c->source.fd < 0) return run.failed++, -1;
    run.open++, run.waiting++;
    watch(&c->source, EPOLLOUT);
    return 0;
}

/* --- one turn of the loop */

void turn(int timeout_ms) {
    struct epoll_event events[64];
    int more = engine_due(), n = epoll_wait(loop, events, 64, more ? 0 : timeout_ms < engine_wait_ms() ? timeout_ms : engine_wait_ms());
    now_ns = clock_ns();
    for (int i = 0; i < n; i++) {
        struct source *source = events[i].data.ptr;
        source->ready(source, events[i].events);
    }
}

void turns(double seconds) {
    for (uint64_t end = clock_ns() + seconds * 1e9; clock_ns() < end;) turn(10);
}

/* --- commands */

static char line[4096];
static int quit;

static void command(void) {
    int port, count, slow, bytes, slow_bytes;
    long us;
    double seconds;
    if (sscanf(line, "streams %d %d %ld %d %lf %d %d", &port, &count, &us, &bytes, &seconds, &slow, &slow_bytes) == 7)
        streams(port, count, us, bytes, seconds, slow, slow_bytes);
    else fprintf(stderr, "what? %s", line), quit = 1;
}

static char pending[sizeof line];
static size_t pending_bytes;

static void on_input(struct source *source, uint32_t events) {
    (void)events;
    ssize_t n = read(source->fd, pending + pending_bytes, sizeof pending - 1 - pending_bytes);
    if (n <= 0) quit = 1;
    else pending_bytes += n;
}

int main(void) {
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    signal(SIGPIPE, SIG_IGN);
    loop = epoll_create1(0);
    printf("{\"ports\":[%d,", engine_listen());
    printf("%d]}\n", engine_listen()), fflush(stdout);
    struct source input = {on_input, 0};
    fcntl(0, F_SETFL, O_NONBLOCK);
    watch(&input, EPOLLIN);
    while (!quit) {
        turn(100);
        char *end = memchr(pending, '\n', pending_bytes);
        if (!end) continue;
        size_t bytes = end + 1 - pending;
        memcpy(line, pending, bytes);
        line[bytes] = 0;
        memmove(pending, pending + bytes, pending_bytes -= bytes);
        command();
    }
    return 0;
}
