/* Bodies of a file, one after another on each of some connections; and connections that stay when they had one answer. */
#define _GNU_SOURCE
#include "loop.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <unistd.h>

static char *text, *at, *end_of_file;
static int keep; /* each connection asks for the first body, once */
static uint64_t answered, bad;

static void next(struct client *c) {
    if (keep) at = text;
    if (at >= end_of_file) return leave(c);
    size_t bytes = strtoul(at, &at, 10);
    char *body = at + 1;
    at = body + bytes;
    c->stream = memmem(body, bytes, "\"stream\":true", 13) || memmem(body, bytes, "\"stream\": true", 14);
    c->head_have = c->body_have = 0, c->length = 0, c->got_head = 0;
    memset(c->tail, 0, sizeof c->tail);
    run.waiting++;
    if (ask(c, body, bytes)) leave(c), bad++;
}

static void complete(struct client *c) {
    answered++;
    bad += !c->ok;
    if (!keep) next(c);
}

static void on_answer(struct source *source, uint32_t events) {
    struct client *c = (struct client *)source;
    if (!c->begun) {
        if (!(events & EPOLLOUT)) return leave(c), (void)run.failed++;
        c->begun = 1, run.waiting--;
        rewatch(source, EPOLLIN);
        return next(c);
    }
    ssize_t n = read(source->fd, buffer, sizeof buffer);
    if (n <= 0) {
        if (n < 0 && errno == EAGAIN) return;
        bad++;
        return leave(c);
    }
    char *data = buffer;
    if (!c->got_head) {
        size_t take = sizeof c->head - 1 - c->head_have < (size_t)n ? sizeof c->head - 1 - c->head_have : (size_t)n;
        memcpy(c->head + c->head_have, data, take);
        c->head[c->head_have + take] = 0;
        char *end = strstr(c->head, "\r\n\r\n"), *length = strcasestr(c->head, "\r\ncontent-length:");
        if (!end) return (void)(c->head_have += take);
        c->ok = !strncmp(c->head, "HTTP/1.1 200", 12);
        c->got_head = 1, run.waiting--;
        if (!c->ok) fprintf(stderr, "answered %s\n", c->head);
        c->stream = !(length && length < end);
        if (!c->stream) c->length = strtoul(length + 17, NULL, 10);
        size_t of_head = end + 4 - c->head - c->head_have;
        data += of_head, n -= of_head;
    }
    if (!c->stream) {
        c->body_have += n;
        if (c->body_have >= c->length) complete(c);
        return;
    }
    size_t keep = n < 5 ? n : 5;
    memmove(c->tail, c->tail + keep, 5 - keep);
    memcpy(c->tail + 5 - keep, data + n - keep, keep);
    if (!memcmp(c->tail, "0\r\n\r\n", 5)) complete(c);
}

static void load(const char *file) {
    FILE *f = fopen(file, "rb");
    if (!f) return perror(file), exit(1);
    fseek(f, 0, SEEK_END);
    long size = ftell(f);
    rewind(f);
    text = need(malloc(size + 1));
    if (fread(text, 1, size, f) != (size_t)size) exit(1);
    fclose(f);
    at = text, end_of_file = text + size;
}

void requests(int port, int connections, const char *path, const char *file, int chunks, long interval_us) {
    engine_pace(interval_us, chunks, 180, 180);
    begin(port, connections);
    run.path = path;
    answered = bad = keep = 0;
    load(file);
    puts("{\"event\":\"begin\"}"), fflush(stdout);
    uint64_t from = clock_ns(), end = from + 120000000000ull, cpu = cpu_ns();
    for (int i = 0; i < connections; i++) join(i, on_answer, 0);
    while (run.open && clock_ns() < end) turn(10);
    double wall = (clock_ns() - from) / 1e9;
    printf("{\"event\":\"end\",\"answered\":%llu,\"bad\":%llu,\"seconds\":%.4f,\"generator_cpu\":%.3f}\n", (unsigned long long)answered,
           (unsigned long long)bad + run.failed, wall, (cpu_ns() - cpu) / 1e9 / wall), fflush(stdout);
    for (int i = 0; i < connections; i++) leave(&run.all[i]);
    turns(0.05);
    free(run.all), free(text);
}

/* One connection after the other, so that a few connections to the engines serve all; they stay. */
void idle(int port, int count, const char *file) {
    engine_pace(1000, 1, 180, 180);
    begin(port, count);
    load(file);
    answered = bad = 0, keep = 1;
    for (int i = 0; i < count; i++) {
        join(i, on_answer, 0);
        for (uint64_t end = clock_ns() + 5000000000ull; answered + bad + run.failed <= (uint64_t)i && clock_ns() < end;) turn(10);
    }
    turns(1.0);
    printf("{\"event\":\"idle\",\"open\":%d,\"bad\":%llu}\n", run.open, (unsigned long long)bad + run.failed), fflush(stdout);
}
