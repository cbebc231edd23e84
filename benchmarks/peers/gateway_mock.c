/* A model server that costs nothing: every POST gets the same answer, every GET a list of one model.

       gateway_mock ANSWER_FILE        prints the port it listens on, then serves until it is ended

   One thread, epoll, keep-alive. It reads no more of a request than where it ends (Content-Length), so that what is
   measured in front of it is the gateway. Left out: chunked requests, pipelining, TLS. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

enum { MAX_CONNECTIONS = 4096, FIRST = 16384, LARGEST = 1 << 24 };

typedef struct {
    char *in;         /* what has come of a request */
    size_t have, size;
    const char *out;  /* what has still to be sent of an answer */
    size_t left;
} Connection;

static Connection connections[MAX_CONNECTIONS];

static char *answer, *models;
static size_t answer_size, models_size;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static char *with_head(const char *body, size_t size, size_t *whole) {
    char head[128];
    int head_size = snprintf(head, sizeof head,
                             "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n", size);
    char *made = malloc(head_size + size);
    memcpy(made, head, head_size);
    memcpy(made + head_size, body, size);
    *whole = head_size + size;
    return made;
}

static void read_answer(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) fail(path);
    static char body[1 << 20];
    size_t size = fread(body, 1, sizeof body, file);
    fclose(file);
    answer = with_head(body, size, &answer_size);
    const char *list = "{\"object\":\"list\",\"data\":[{\"id\":\"tiny\",\"object\":\"model\",\"owned_by\":\"mock\"}]}";
    models = with_head(list, strlen(list), &models_size);
}

static void hang_up(int fd) {
    free(connections[fd].in);
    memset(&connections[fd], 0, sizeof(Connection));
    close(fd);
}

/* The size of the request that begins the buffer, or 0 if it is not whole yet. */
static size_t request_size(const Connection *c) {
    char *end = memmem(c->in, c->have, "\r\n\r\n", 4);
    if (!end) return 0;
    size_t body = 0;
    for (char *line = c->in; line < end; line = (char *)memchr(line, '\n', end + 2 - line) + 1)
        if (!strncasecmp(line, "content-length:", 15)) body = strtoul(line + 15, NULL, 10);
    size_t whole = end + 4 - c->in + body;
    return c->have >= whole ? whole : 0;
}

static void watch(int epoll, int fd, int events) {
    struct epoll_event event = {.events = events, .data.fd = fd};
    epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event);
}

static void flush_out(int epoll, int fd, int watched) {
    Connection *c = &connections[fd];
    while (c->left) {
        ssize_t sent = send(fd, c->out, c->left, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN) return hang_up(fd);
        if (sent < 0) return watch(epoll, fd, EPOLLOUT);
        c->out += sent;
        c->left -= sent;
    }
    if (watched) watch(epoll, fd, EPOLLIN);
}

static void readable(int epoll, int fd) {
    Connection *c = &connections[fd];
    for (;;) {
        if (c->have == c->size) {
            if (c->size >= LARGEST) return hang_up(fd);
            c->size = c->size ? 2 * c->size : FIRST;
            c->in = realloc(c->in, c->size);
        }
        size_t room = c->size - c->have;
        ssize_t got = recv(fd, c->in + c->have, room, 0);
        if (got == 0) return hang_up(fd);
        if (got < 0) break;
        c->have += got;
        if ((size_t)got < room) break;
    }
    size_t whole = request_size(c);
    if (!whole) return;
    int get = !strncmp(c->in, "GET ", 4);
    memmove(c->in, c->in + whole, c->have - whole);
    c->have -= whole;
    c->out = get ? models : answer;
    c->left = get ? models_size : answer_size;
    flush_out(epoll, fd, 0);
}

int main(int argc, char **argv) {
    if (argc != 2) return fprintf(stderr, "usage: gateway_mock ANSWER_FILE\n"), 2;
    signal(SIGPIPE, SIG_IGN);
    read_answer(argv[1]);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    if (bind(listener, (struct sockaddr *)&address, size) || listen(listener, 2048)) fail("listen");
    getsockname(listener, (struct sockaddr *)&address, &size);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    int epoll = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener}, ready[256];
    epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event);
    for (;;) {
        int count = epoll_wait(epoll, ready, 256, -1);
        for (int i = 0; i < count; i++) {
            int fd = ready[i].data.fd;
            if (fd == listener) {
                int made = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
                if (made < 0) continue;
                if (made >= MAX_CONNECTIONS) {
                    close(made);
                    continue;
                }
                setsockopt(made, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                struct epoll_event add = {.events = EPOLLIN, .data.fd = made};
                epoll_ctl(epoll, EPOLL_CTL_ADD, made, &add);
            } else if (ready[i].events & EPOLLOUT) {
                flush_out(epoll, fd, 1);
            } else {
                readable(epoll, fd);
            }
        }
    }
}
