/* A mock engine: OpenAI's endpoints over HTTP/1.1, streams at a set pace off one timing wheel. Every chunk tells when it
   was written. A stream that its reader holds back skips chunks (`blocked`) and keeps at most one in hand. */
#define _GNU_SOURCE
#include "loop.h"
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define SLOTS 512 /* of 1 ms: the longest interval */

struct conn {
    struct source source;
    char *in; /* the request being read */
    size_t have, room;
    char *held; /* what the socket did not take */
    size_t held_bytes, held_at;
    int streaming, slow; /* until engine_end */
    uint64_t due_us;
    struct conn *next, **at; /* in the wheel */
};

struct counts engine_counts;
static uint64_t interval_us = 50000;
static int ending;
static struct conn *wheel[SLOTS], *due;
static uint64_t turned_ms; /* slots up to here are empty; behind the clock where there is too much to write */
static char *text[2];      /* a chunk, and one of a slow reader's stream */
static size_t text_bytes[2], stamp_at[2];

static const char STREAM_HEAD[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
static const char LAST[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
static char full[2048], models[512], info[512], okay[256];

static size_t reply(char *to, size_t room, const char *body) {
    return snprintf(to, room, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s", strlen(body), body);
}

static void prepare_replies(void) {
    char body[1024], words[512] = "";
    for (int i = 0; i < 64; i++) strcat(words, "hello ");
    snprintf(body, sizeof body, "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"m\",\"choices\":[{\"index\":0,"
             "\"message\":{\"role\":\"assistant\",\"content\":\"%s\"},\"finish_reason\":\"stop\"}],"
             "\"usage\":{\"completion_tokens\":64,\"total_tokens\":1064}}", words);
    reply(full, sizeof full, body);
    reply(models, sizeof models, "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"owned_by\":\"vllm\",\"max_model_len\":131072}]}");
    reply(info, sizeof info, "{\"model_path\":\"m\",\"is_generation\":true,\"status\":\"ready\",\"model_type\":\"llama\"}");
    reply(okay, sizeof okay, "{}");
}

static void make_text(int kind, int bytes) {
    static const char before[] = "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"@";
    static const char after[] = "\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n";
    int fixed = sizeof before - 1 + 16 + sizeof after - 1, fill = bytes > fixed ? bytes - fixed : 0;
    free(text[kind]);
    text[kind] = need(malloc(fixed + fill + 64));
    int n = sprintf(text[kind], "%x\r\n%s", fixed + fill, before);
    stamp_at[kind] = n;
    n += 16;
    memset(text[kind] + n, 'x', fill);
    n += fill;
    n += sprintf(text[kind] + n, "%s\r\n", after);
    text_bytes[kind] = n;
}

void engine_pace(uint64_t us, int chunk_bytes, int slow_chunk_bytes) {
    interval_us = us, ending = 0;
    make_text(0, chunk_bytes);
    make_text(1, slow_chunk_bytes);
}

void engine_end(void) { ending = 1; }

static void unlist(struct conn *c) {
    if (!c->at) return;
    *c->at = c->next;
    if (c->next) c->next->at = c->at;
    c->at = NULL;
}

static void list(struct conn *c, struct conn **head) {
    c->next = *head;
    if (c->next) c->next->at = &c->next;
    c->at = head;
    *head = c;
}

static void schedule(struct conn *c) {
    uint64_t ms = c->due_us / 1000;
    list(c, &wheel[(ms > turned_ms ? ms : turned_ms + 1) % SLOTS]);
}

static void drop(struct conn *c) {
    if (c->streaming) engine_counts.streaming--;
    unlist(c);
    close(c->source.fd);
    free(c->in);
    free(c->held);
    free(c);
}

/* All of it goes or is held. -1: the connection is gone. */
static int put(struct conn *c, const char *data, size_t bytes) {
    ssize_t n = c->held_bytes ? 0 : write(c->source.fd, data, bytes);
    if (n < 0) {
        if (errno != EAGAIN) return -1;
        n = 0;
    }
    if (c->slow) engine_counts.slow_bytes += n;
    if ((size_t)n < bytes) {
        c->held = need(realloc(c->held, c->held_bytes + bytes - n));
        memcpy(c->held + c->held_bytes, data + n, bytes - n);
        c->held_bytes += bytes - n;
        rewatch(&c->source, EPOLLIN | EPOLLOUT);
    }
    return 0;
}

static int unhold(struct conn *c) {
    ssize_t n = write(c->source.fd, c->held + c->held_at, c->held_bytes - c->held_at);
    if (n < 0) return errno == EAGAIN ? 0 : -1;
    if (c->slow) engine_counts.slow_bytes += n;
    c->held_at += n;
    if (c->held_at == c->held_bytes) {
        free(c->held);
        c->held = NULL, c->held_bytes = c->held_at = 0;
        rewatch(&c->source, EPOLLIN);
    }
    return 0;
}

static int begin_stream(struct conn *c, const char *body, size_t bytes) {
    c->streaming = 1;
    c->slow = memmem(body, bytes, SLOW, strlen(SLOW)) != NULL;
    engine_counts.streaming++;
    if (engine_counts.streaming == 1) turned_ms = clock_ns() / 1000000; /* the wheel stood still */
    c->due_us = turned_ms * 1000 + 1000 + random() % interval_us; /* they don't beat in step */
    schedule(c);
    return put(c, STREAM_HEAD, sizeof STREAM_HEAD - 1);
}

static int answer(struct conn *c, const char *head, size_t head_bytes, const char *body, size_t body_bytes) {
    const char *line_end = memchr(head, '\r', head_bytes);
    size_t line = line_end - head;
    engine_counts.requests++;
    if (memmem(head, line, "completions", 11)) {
        if (memmem(body, body_bytes, "\"stream\":true", 13) || memmem(body, body_bytes, "\"stream\": true", 14)) return begin_stream(c, body, body_bytes);
        return put(c, full, strlen(full));
    }
    const char *said = memmem(head, line, "/v1/models", 10) ? models : memmem(head, line, "info", 4) ? info : okay;
    return put(c, said, strlen(said));
}

/* The bytes of a chunked body, unframed in place; -1: more must come. */
static long unchunk(char *body, size_t bytes, size_t *taken) {
    size_t at = 0, out = 0;
    for (;;) {
        char *end = memmem(body + at, bytes - at, "\r\n", 2);
        if (!end) return -1;
        size_t size = strtoul(body + at, NULL, 16), start = end - body + 2;
        if (start + size + 2 > bytes) return -1;
        if (!size) return *taken = start + 2, (long)out;
        at = start + size + 2;
        out += size; /* where it lies does not matter here: only looked at for marks */
    }
}

static int read_requests(struct conn *c) {
    while (c->have && !c->streaming) {
        char *end = memmem(c->in, c->have, "\r\n\r\n", 4);
        if (!end) return 0;
        size_t head = end - c->in + 4, length = 0, taken = 0;
        for (char *line = c->in; line < end; line = strstr(line, "\r\n") + 2) {
            if (!strncasecmp(line, "content-length:", 15)) length = taken = strtoul(line + 15, NULL, 10);
            if (!strncasecmp(line, "transfer-encoding:", 18)) {
                long got = unchunk(c->in + head, c->have - head, &taken);
                if (got < 0) return 0;
                length = taken;
            }
        }
        if (c->have < head + taken) return 0;
        if (answer(c, c->in, head, c->in + head, length)) return -1;
        c->have -= head + taken;
        memmove(c->in, c->in + head + taken, c->have);
        c->in[c->have] = 0;
    }
    return 0;
}

static void on_conn(struct source *source, uint32_t events) {
    struct conn *c = (struct conn *)source;
    if (events & EPOLLOUT && unhold(c)) return drop(c);
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
    if (c->room - c->have < 16384) c->in = need(realloc(c->in, (c->room = c->room * 2 + 32768) + 1));
    ssize_t n = read(source->fd, c->in + c->have, c->room - c->have);
    if (n <= 0) {
        if (n < 0 && errno == EAGAIN) return;
        return drop(c);
    }
    c->have += n;
    c->in[c->have] = 0;
    if (read_requests(c)) drop(c);
}

static void on_listener(struct source *source, uint32_t events) {
    (void)events;
    int fd, one = 1;
    while ((fd = accept4(source->fd, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct conn *c = need(calloc(1, sizeof *c));
        c->source = (struct source){on_conn, fd};
        watch(&c->source, EPOLLIN);
    }
}

int engine_listen(void) {
    struct sockaddr_in where = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof where;
    struct source *source = need(calloc(1, sizeof *source));
    *source = (struct source){on_listener, socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0)};
    if (bind(source->fd, (struct sockaddr *)&where, size) || listen(source->fd, 4096)) return perror("engine"), exit(1), 0;
    getsockname(source->fd, (struct sockaddr *)&where, &size);
    if (!full[0]) prepare_replies();
    watch(source, EPOLLIN);
    return ntohs(where.sin_port);
}

static void one_chunk(struct conn *c) {
    unlist(c);
    if (ending) {
        c->streaming = 0, engine_counts.streaming--;
        if (put(c, LAST, sizeof LAST - 1) || read_requests(c)) drop(c);
        return;
    }
    if (c->held_bytes) {
        engine_counts.blocked += !c->slow;
    } else {
        char stamp[17], *to = text[c->slow];
        sprintf(stamp, "%016llx", (unsigned long long)clock_ns());
        memcpy(to + stamp_at[c->slow], stamp, 16);
        if (put(c, to, text_bytes[c->slow])) return drop(c);
        engine_counts.written += !c->slow;
    }
    c->due_us += interval_us;
    schedule(c);
}

int engine_due(void) {
    uint64_t ms = clock_ns() / 1000000;
    /* Only when all of a slot is written comes the next: late, the wheel turns slower and nobody is left out. */
    while (!due && turned_ms < ms && engine_counts.streaming) {
        turned_ms++;
        for (struct conn *c; (c = wheel[turned_ms % SLOTS]);) unlist(c), list(c, &due);
    }
    for (int n = 0; n < 16 && due; n++) one_chunk(due); /* few at a time: clients are read between them */
    return due != NULL;
}

int engine_wait_ms(void) { return engine_counts.streaming ? 1 : 100; }
