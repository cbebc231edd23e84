/* Agents without a brain: they hold tool conversations with a gateway as fast as it answers.

       gateway_load PORT CONVERSATION TARGETS CONCURRENT SECONDS [PID [RAMP]]

   TARGETS has one rollout per line: its path, a tab, its authorization header. CONVERSATION has one request body per
   line, turn by turn, in which \x01 stands for the rollout's number and, with a byte 0x80 + t behind it, \x02 for the
   tool calls that were answered in turn t and \x03 for the id of the first of them. So each rollout gives back exactly
   what it was told.

   CONCURRENT connections, one rollout each at a time, all of its turns in order. After SECONDS no request is begun; 0
   means until all rollouts are through. With PID all rollouts take a turn before any takes the next one, and the CPU
   time of that process is told per turn; PID 0 is none. The connections begin one after the other within RAMP seconds.
   The figures are printed as JSON.

   One thread, epoll, keep-alive. An answer must have a Content-Length. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

enum { MAX_TURNS = 64, REQUEST = 1 << 18, ANSWER = 1 << 17 };

typedef struct { char *at; size_t size; } Text;

typedef struct {
    char *path, *header;
    Text calls[MAX_TURNS];
} Rollout;

typedef struct {
    int fd, rollout, turn; /* rollout -1: nothing to do */
    char *in, *out;
    size_t have, out_size, sent;
    double began;
} Connection;

typedef struct { double *at; size_t count, size; double sum, cpu; } Times;

static Text bodies[MAX_TURNS];
static int turns, port, by_turn, epoll;
static Rollout *rollouts;
static size_t num_rollouts, next_rollout, requests, errors, reconnects, sent_bytes, answer_bytes;
static int turn_now;
static char first_error[400];
static double deadline;
static Times times[MAX_TURNS];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

/* Seconds all threads of a process have run so far. */
static double cpu_of(int pid) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *folder = opendir(path);
    if (!folder) fail(path);
    double sum = 0;
    for (struct dirent *entry; (entry = readdir(folder));) {
        char name[384];
        unsigned long long ns;
        snprintf(name, sizeof name, "%s/%s/schedstat", path, entry->d_name);
        FILE *file = entry->d_name[0] == '.' ? NULL : fopen(name, "r");
        if (!file) continue;
        if (fscanf(file, "%llu", &ns) == 1) sum += ns / 1e9;
        fclose(file);
    }
    closedir(folder);
    return sum;
}

static char *read_all(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    if (!file) fail(path);
    fseek(file, 0, SEEK_END);
    *size = ftell(file);
    rewind(file);
    char *all = malloc(*size + 1);
    if (fread(all, 1, *size, file) != *size) fail(path);
    all[*size] = 0;
    fclose(file);
    return all;
}

static void read_inputs(const char *conversation, const char *targets) {
    size_t size;
    char *rest = read_all(conversation, &size), *line;
    while ((line = strsep(&rest, "\n")) && *line) {
        if (turns == MAX_TURNS) fail("too many turns");
        bodies[turns++] = (Text){line, strlen(line)};
    }
    rest = read_all(targets, &size);
    for (char *c = rest; *c; c++) num_rollouts += *c == '\n';
    rollouts = calloc(num_rollouts, sizeof *rollouts);
    for (size_t i = 0; i < num_rollouts; i++) {
        line = strsep(&rest, "\n");
        rollouts[i].path = strsep(&line, "\t");
        rollouts[i].header = line;
    }
}

/* -- requests ----------------------------------------------------------------------------------------------------- */

static char *put(char *to, const char *what, size_t size) {
    memcpy(to, what, size);
    return to + size;
}

static Text first_id(Text calls) {
    char *at = memmem(calls.at, calls.size, "\"id\":", 5);
    if (!at) return (Text){"", 0};
    at = (char *)memchr(at + 5, '"', calls.at + calls.size - at - 5) + 1;
    return (Text){at, (char *)memchr(at, '"', calls.at + calls.size - at) - at};
}

static void make_request(Connection *c) {
    static char body[REQUEST];
    Rollout *rollout = &rollouts[c->rollout];
    Text pattern = bodies[c->turn];
    char *to = body;
    for (char *from = pattern.at, *end = from + pattern.size; from < end; from++) {
        if (to > body + REQUEST / 2) fail("a request is too large");
        if (*from == 1) {
            to += sprintf(to, "%d", c->rollout);
        } else if (*from == 2 || *from == 3) {
            Text calls = rollout->calls[(unsigned char)from[1] - 0x80];
            Text text = *from == 2 ? calls : first_id(calls);
            to = put(to, text.at, text.size);
            from++;
        } else {
            *to++ = *from;
        }
    }
    size_t size = to - body;
    int head = sprintf(c->out,
                       "POST %s HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n"
                       "authorization: %s\r\ncontent-length: %zu\r\n\r\n",
                       rollout->path, port, rollout->header, size);
    put(c->out + head, body, size);
    c->out_size = head + size;
    c->sent = c->have = 0;
    sent_bytes += c->out_size;
}

/* The array of tool calls in an answer, from bracket to bracket. */
static Text find_calls(char *at, size_t size) {
    char *end = at + size;
    at = memmem(at, size, "\"tool_calls\":", 13);
    if (!at) return (Text){NULL, 0};
    for (at += 13; at < end && *at == ' '; at++) {}
    int depth = 0, quoted = 0;
    for (char *c = at; c < end; c++) {
        if (quoted && *c == '\\') c++;
        else if (*c == '"') quoted = !quoted;
        else if (!quoted && *c == '[') depth++;
        else if (!quoted && *c == ']' && --depth == 0) return (Text){at, c + 1 - at};
        else if (!depth) break;
    }
    return (Text){NULL, 0};
}

/* -- connections -------------------------------------------------------------------------------------------------- */

static void open_connection(Connection *c) {
    int one = 1;
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(c->fd, (struct sockaddr *)&address, sizeof address)) fail("connect");
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(epoll, EPOLL_CTL_ADD, c->fd, &event);
}

static void send_more(Connection *c) {
    while (c->sent < c->out_size) {
        ssize_t sent = send(c->fd, c->out + c->sent, c->out_size - c->sent, MSG_NOSIGNAL);
        if (sent <= 0) return; /* hung up: the read says so */
        c->sent += sent;
    }
}

/* Give a connection its next request. False: there is none for it. */
static int begin(Connection *c) {
    if (deadline && now() >= deadline) return c->rollout = -1, 0;
    if (!by_turn && c->rollout >= 0 && c->turn + 1 < turns) {
        c->turn++;
    } else {
        if (next_rollout == num_rollouts) return c->rollout = -1, 0;
        c->rollout = next_rollout++;
        c->turn = by_turn ? turn_now : 0;
    }
    make_request(c);
    c->began = now();
    send_more(c);
    return 1;
}

static void wrong(Connection *c, const char *why) {
    int shown = c->have > 300 ? 300 : (int)c->have;
    if (!errors++) snprintf(first_error, sizeof first_error, "%s: %.*s", why, shown, c->in);
    c->turn = turns; /* this rollout has come to its end */
}

static void remember(Times *t, double seconds) {
    if (t->count == t->size) t->at = realloc(t->at, (t->size = t->size ? 2 * t->size : 1024) * sizeof(double));
    t->at[t->count++] = seconds;
    t->sum += seconds;
}

static void hung_up(Connection *c) {
    if (c->rollout >= 0) wrong(c, "the connection was closed");
    close(c->fd);
    reconnects++;
    open_connection(c);
}

/* True: an answer is whole, or will never be. */
static int readable(Connection *c) {
    ssize_t got = recv(c->fd, c->in + c->have, ANSWER - c->have, 0);
    if (got <= 0) {
        int waited = c->rollout >= 0;
        hung_up(c);
        return waited;
    }
    c->have += got;
    char *end = memmem(c->in, c->have, "\r\n\r\n", 4);
    if (!end) return 0;
    char *length = NULL;
    for (char *line = c->in; line < end; line = (char *)memchr(line, '\n', end + 2 - line) + 1)
        if (!strncasecmp(line, "content-length:", 15)) length = line + 15;
    if (!length) return wrong(c, "an answer without Content-Length"), 1;
    size_t size = strtoul(length, NULL, 10), whole = end + 4 - c->in + size;
    if (whole > ANSWER) fail("an answer is too large");
    if (c->have < whole) return 0;
    remember(&times[c->turn], now() - c->began);
    requests++;
    answer_bytes += whole;
    Text calls = find_calls(end + 4, size);
    if (strncmp(c->in + 9, "200", 3)) return wrong(c, "not a success"), 1;
    if (!calls.at) return wrong(c, "no tool calls"), 1;
    Text *kept = &rollouts[c->rollout].calls[c->turn];
    kept->at = realloc(kept->at, calls.size);
    kept->size = calls.size;
    memcpy(kept->at, calls.at, calls.size);
    if (c->turn + 1 == turns) /* what a rollout was told is of no use any more */
        for (int t = 0; t < turns; t++) free(rollouts[c->rollout].calls[t].at);
    return 1;
}

static void drive(Connection *connections, int concurrent, double ramp) {
    struct epoll_event ready[256];
    int busy = 0, begun = 0;
    double first = now();
    for (int i = 0; i < concurrent; i++) connections[i].rollout = -1;
    while (busy || begun < concurrent) {
        while (begun < concurrent && now() - first >= ramp * begun / concurrent) busy += begin(&connections[begun++]);
        int count = epoll_wait(epoll, ready, 256, begun < concurrent ? 1 : -1);
        for (int i = 0; i < count; i++) {
            Connection *c = ready[i].data.ptr;
            if (readable(c)) busy -= !begin(c);
        }
    }
}

/* -- figures ------------------------------------------------------------------------------------------------------ */

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double cut(const Times *t, double share) { return t->count ? t->at[(size_t)(share * (t->count - 1))] * 1000 : 0; }

static void print_times(Times *t) {
    qsort(t->at, t->count, sizeof(double), ascending);
    printf("\"requests\": %zu, \"mean_ms\": %.4f, \"p50_ms\": %.4f, \"p99_ms\": %.4f, \"worst_ms\": %.4f", t->count,
           t->count ? t->sum / t->count * 1000 : 0, cut(t, .5), cut(t, .99), cut(t, 1));
}

static void print_text(const char *text) {
    putchar('"');
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') putchar('\\');
        putchar((unsigned char)*text < 32 ? ' ' : *text);
    }
    putchar('"');
}

int main(int argc, char **argv) {
    if (argc < 6) return fprintf(stderr, "usage: gateway_load PORT CONVERSATION TARGETS CONCURRENT SECONDS [PID [RAMP]]\n"), 2;
    port = atoi(argv[1]);
    read_inputs(argv[2], argv[3]);
    int concurrent = atoi(argv[4]), pid = argc > 6 ? atoi(argv[6]) : 0;
    double seconds = atof(argv[5]), ramp = argc > 7 ? atof(argv[7]) : 0;
    by_turn = pid != 0;
    epoll = epoll_create1(0);
    Connection *connections = calloc(concurrent, sizeof *connections);
    for (int i = 0; i < concurrent; i++) {
        connections[i].in = malloc(ANSWER);
        connections[i].out = malloc(REQUEST + 1024);
        open_connection(&connections[i]);
    }
    double began = now();
    deadline = seconds ? began + seconds : 0;
    if (by_turn) {
        for (turn_now = 0; turn_now < turns; turn_now++, next_rollout = 0) {
            double before = cpu_of(pid);
            drive(connections, concurrent, ramp);
            times[turn_now].cpu = cpu_of(pid) - before;
        }
    } else {
        drive(connections, concurrent, ramp);
    }
    double took = now() - began;
    Times all = {0};
    for (int t = 0; t < turns; t++)
        for (size_t i = 0; i < times[t].count; i++) remember(&all, times[t].at[i]);
    printf("{\"seconds\": %.6f, \"rate\": %.3f, ", took, requests / took);
    print_times(&all);
    printf(", \"errors\": %zu, \"reconnects\": %zu, \"request_bytes\": %.0f, \"answer_bytes\": %.0f, \"rollouts\": %zu",
           errors, reconnects, requests ? (double)sent_bytes / requests : 0,
           requests ? (double)answer_bytes / requests : 0, next_rollout);
    printf(", \"first_error\": ");
    print_text(first_error);
    printf(", \"turns\": [");
    for (int t = 0; t < turns; t++) {
        printf("%s{", t ? ", " : "");
        print_times(&times[t]);
        printf(", \"cpu_ms\": %.4f}", times[t].count ? times[t].cpu / times[t].count * 1000 : 0);
    }
    printf("]}\n");
    return 0;
}
