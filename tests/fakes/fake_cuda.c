/* A libcuda for tests: it tells a version, and its streams are plain memory laid out as the driver lays out
 * its own: a handle points to a pointer to the stream object. Built by tests/fakes/fake_streams.py. */
#include <stdlib.h>
#include <string.h>

struct stream {
    unsigned char *object;
};

static int the_version = 13000;
static int the_result = 0;

int cuDriverGetVersion(int *version) {
    *version = the_version;
    return the_result;
}

/* What cuDriverGetVersion answers from now on. */
void fake_answer(int version, int result) {
    the_version = version;
    the_result = result;
}

/* A stream whose object has `bytes` bytes, each of them `fill`. */
struct stream *fake_stream_create(size_t bytes, int fill) {
    struct stream *stream = malloc(sizeof *stream);
    stream->object = malloc(bytes);
    memset(stream->object, fill, bytes);
    return stream;
}
