/* What the engine's side and the clients' side of the load generator share: one epoll loop, one clock. */
#ifndef LOOP_H
#define LOOP_H
#include <stddef.h>
#include <stdint.h>

/* Whatever epoll knows begins with this: whom to call. */
struct source {
    void (*ready)(struct source *, uint32_t events);
    int fd;
};

extern int loop;        /* the epoll's descriptor */
extern uint64_t now_ns; /* monotonic, read when epoll returned */

uint64_t clock_ns(void);
void watch(struct source *, uint32_t events);
void rewatch(struct source *, uint32_t events);
void *need(void *); /* ends the program where memory is out */

/* The engine: any number of listening ports; answers chats at once, or as streams at a set pace. */
int engine_listen(void); /* returns its port */
void engine_pace(uint64_t interval_us, int chunk_bytes, int slow_chunk_bytes);
void engine_end(void);          /* every endless stream ends with its next chunk */
int engine_due(void);           /* streams whose time has come: write some of them, then ask again */
int engine_wait_ms(void);       /* until the next one's time */

struct counts {
    uint64_t written, blocked, slow_bytes, requests, streaming;
};
extern struct counts engine_counts;

/* In the text of a chunk: MARK and the time it was written, 16 hex digits of nanoseconds. */
#define MARK '@'
/* In the body of a request: its client will stop reading. */
#define SLOW "#slow#"

/* The clients: one set at a time. */
struct client {
    struct source source;
    int begun, got_head;
    int slow, digits;
    uint64_t stamp, last_written, last_read; /* the last two of the chunk before */
};

extern struct clients {
    struct client *all;
    int port, count, open, waiting, failed; /* waiting: no byte of an answer yet */
} run;

extern char buffer[1 << 18];
uint64_t cpu_ns(void);
void turn(int timeout_ms);
void turns(double seconds);
void begin(int port, int count);
int join(int number, void (*ready)(struct source *, uint32_t), int slow); /* connects; 0: it is under way */
void leave(struct client *);
int ask(struct client *, const char *body, size_t bytes);

void streams(int port, int count, long interval_us, int chunk_bytes, double seconds, int slow, int slow_bytes);
#endif
