/* The least a proxy can do, as the floor under every gateway's figures: one thread, epoll, HTTP/1.1 kept alive on both sides,
   connections to the engines pooled and taken in turn. It looks for where a message ends and at nothing else.

     null_proxy PORT ENGINE_PORT...                                                                                     */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

enum side { LISTENER, CLIENT, ENGINE };

struct conn {
    enum side side;
    int fd, server, paused, framed, chunked; /* framed: the head has been read; `left` is of a body with a length */
    long left;
    struct conn *peer; /* the engine that answers this client, and back */
    struct conn *next; /* in the pool */
    char *held;        /* what the socket did not take */
    size_t held_bytes;
    char tail[5];
};

static int loop, servers, turn_of;
static struct sockaddr_in server_at[8];
static struct conn *pool[8];
static char buffer[1 << 16];

static void watch(struct conn *c, int how) {
    struct epoll_event event = {(c->paused ? 0 : EPOLLIN) | (c->held_bytes ? EPOLLOUT : 0), {.ptr = c}};
    epoll_ctl(loop, how, c->fd, &event);
}

static struct conn *add(int fd, enum side side) {
    struct conn *c = calloc(1, sizeof *c);
    int one = 1;
    if (!c) exit(1);
    c->fd = fd, c->side = side;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    watch(c, EPOLL_CTL_ADD);
    return c;
}

/* Closed now, freed with the batch of events it may still be in. */
static struct conn *dead;
static void end(struct conn *c) {
    if (c->fd < 0) return;
    close(c->fd);
    c->fd = -1;
    if (c->side == ENGINE)
        for (struct conn **at = &pool[c->server]; *at; at = &(*at)->next)
            if (*at == c) {
                *at = c->next;
                break;
            }
    c->next = dead, dead = c;
    if (c->peer) c->peer->peer = NULL, end(c->peer);
}

static void put(struct conn *to, const char *data, size_t bytes, struct conn *from) {
    ssize_t n = to->held_bytes ? 0 : write(to->fd, data, bytes);
    if (n < 0 && errno != EAGAIN) return end(to);
    if (n < 0) n = 0;
    if ((size_t)n == bytes) return;
    to->held = realloc(to->held, to->held_bytes + bytes - n);
    if (!to->held) exit(1);
    memcpy(to->held + to->held_bytes, data + n, bytes - n);
    to->held_bytes += bytes - n;
    from->paused = 1;
    watch(to, EPOLL_CTL_MOD), watch(from, EPOLL_CTL_MOD);
}

static void unhold(struct conn *c) {
    ssize_t n = write(c->fd, c->held, c->held_bytes);
    if (n < 0) return errno == EAGAIN ? (void)0 : end(c);
    memmove(c->held, c->held + n, c->held_bytes -= n);
    if (c->held_bytes) return;
    watch(c, EPOLL_CTL_MOD);
    if (c->peer && c->peer->paused) c->peer->paused = 0, watch(c->peer, EPOLL_CTL_MOD);
}

/* Whether the message ends with these bytes. */
static int ends(struct conn *c, char *data, size_t bytes) {
    if (!c->framed) {
        char *head_end = memmem(data, bytes, "\r\n\r\n", 4), *at = data;
        if (!head_end) return -1; /* a head in two pieces: not from the generator */
        c->framed = 1, c->chunked = 0, c->left = 0;
        for (; at < head_end; at = (char *)memchr(at, '\n', head_end + 4 - at) + 1) {
            if (!strncasecmp(at, "content-length:", 15)) c->left = strtol(at + 15, NULL, 10);
            else if (!strncasecmp(at, "transfer-encoding:", 18)) c->chunked = 1;
        }
        c->left -= data + bytes - head_end - 4;
    } else c->left -= bytes;
    if (c->chunked) {
        size_t keep = bytes < 5 ? bytes : 5;
        memmove(c->tail, c->tail + keep, 5 - keep);
        memcpy(c->tail + 5 - keep, data + bytes - keep, keep);
    }
    int over = c->chunked ? !memcmp(c->tail, "0\r\n\r\n", 5) : c->left <= 0;
    if (over) c->framed = 0, memset(c->tail, 0, 5);
    return over;
}

static struct conn *engine(void) {
    int server = turn_of++ % servers;
    struct conn *c = pool[server];
    if (c) {
        pool[server] = c->next, c->next = NULL;
        return c;
    }
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, (struct sockaddr *)&server_at[server], sizeof server_at[0])) return close(fd), NULL;
    c = add(fd, ENGINE);
    c->server = server;
    return c;
}

static void from_client(struct conn *c, ssize_t n) {
    if (!c->peer) {
        if (!(c->peer = engine())) return end(c);
        c->peer->peer = c;
    }
    if (ends(c, buffer, n) < 0) return end(c);
    put(c->peer, buffer, n, c);
}

static void from_engine(struct conn *c, ssize_t n) {
    struct conn *client = c->peer;
    if (!client) return end(c);
    int over = ends(c, buffer, n);
    if (over < 0) return end(c);
    put(client, buffer, n, c);
    if (over && c->peer) {
        c->peer = client->peer = NULL;
        if (c->paused) c->paused = 0, watch(c, EPOLL_CTL_MOD);
        c->next = pool[c->server], pool[c->server] = c;
    }
}

static void ready(struct conn *c, uint32_t events) {
    if (c->fd < 0) return;
    if (c->side == LISTENER) {
        int fd = accept4(c->fd, NULL, NULL, SOCK_NONBLOCK);
        if (fd >= 0) add(fd, CLIENT);
        return;
    }
    if (events & EPOLLOUT) unhold(c);
    if (c->fd < 0 || !(events & ~EPOLLOUT)) return;
    ssize_t n = recv(c->fd, buffer, sizeof buffer, MSG_DONTWAIT);
    if (n <= 0) return n < 0 && errno == EAGAIN ? (void)0 : end(c);
    (c->side == CLIENT ? from_client : from_engine)(c, n);
}

int main(int argc, char **argv) {
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (argc < 3 || argc > 10) return 2;
    for (int i = 2; i < argc; i++) server_at[servers] = here, server_at[servers++].sin_port = htons(atoi(argv[i]));
    here.sin_port = htons(atoi(argv[1]));
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (struct sockaddr *)&here, sizeof here) || listen(fd, 4096)) return perror("null_proxy"), 1;
    signal(SIGPIPE, SIG_IGN);
    loop = epoll_create1(0);
    add(fd, LISTENER);
    for (struct epoll_event events[64];;) {
        int n = epoll_wait(loop, events, 64, -1);
        for (int i = 0; i < n; i++) ready(events[i].data.ptr, events[i].events);
        for (struct conn *c; (c = dead);) dead = c->next, free(c->held), free(c);
    }
}
