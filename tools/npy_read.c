/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "npy.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the command reads little-endian files into memory as they are"
#endif

#define MAX_HEADER (1 << 20)

static const struct {
    const char *descr, *name;
    size_t size;
    heddle_dtype dtype;
} types[] = {
    [NPY_F16] = {"<f2", "float16", 2, HEDDLE_F16}, [NPY_F32] = {"<f4", "float32", 4, HEDDLE_F32},
    [NPY_F64] = {"<f8", "float64", 8, HEDDLE_F64}, [NPY_BOOL] = {"|b1", "bool", 1, HEDDLE_F32},
    [NPY_I32] = {"<i4", "int32", 4, HEDDLE_F32},
};
enum { TYPES = sizeof types / sizeof *types };

const char *npy_type_name(npy_type type) {
    return types[type].name;
}

size_t npy_type_size(npy_type type) {
    return types[type].size;
}

bool npy_is_float(npy_type type) {
    return type <= NPY_F64;
}

heddle_dtype npy_dtype(npy_type type) {
    return types[type].dtype;
}

void npy_shape_text(int rank, const int64_t *shape, char *text, size_t n) {
    size_t used = (size_t)snprintf(text, n, "[");
    for (int i = 0; i < rank && used < n; i++)
        used += (size_t)snprintf(text + used, n - used, "%s%lld", i ? ", " : "", (long long)shape[i]);
    if (used < n)
        snprintf(text + used, n - used, "]");
}

/* ----------------------------------------------------------------------------------- the header's Python literal */

typedef struct parser {
    const char *path, *at, *end;
} parser;

/* Where a header's text is not what NumPy writes. */
static bool malformed(const parser *p, const char *expected) {
    complain("%s: malformed .npy header: %s expected", p->path, expected);
    return false;
}

static void skip_space(parser *p) {
    while (p->at < p->end && strchr(" \t\r\n", *p->at) && *p->at)
        p->at++;
}

/* The next character that is no space, if it is `c`. */
static bool take(parser *p, char c) {
    skip_space(p);
    if (p->at == p->end || *p->at != c)
        return false;
    p->at++;
    return true;
}

static bool take_word(parser *p, const char *word) {
    size_t n = strlen(word);
    skip_space(p);
    if ((size_t)(p->end - p->at) < n || memcmp(p->at, word, n))
        return false;
    p->at += n;
    return true;
}

static bool parse_string(parser *p, char *text, size_t n) {
    skip_space(p);
    char quote = p->at < p->end ? *p->at : 0;
    if (quote != '\'' && quote != '"')
        return malformed(p, "a string");
    const char *stop = memchr(p->at + 1, quote, (size_t)(p->end - p->at - 1));
    size_t length = stop ? (size_t)(stop - p->at - 1) : n;
    bool plain = length < n;
    for (size_t i = 1; plain && i <= length; i++) /* what a message may repeat in its line */
        plain = p->at[i] >= ' ' && p->at[i] <= '~' && p->at[i] != '\\';
    if (!plain)
        return malformed(p, "a short string of plain letters");
    memcpy(text, p->at + 1, length);
    text[length] = 0;
    p->at = stop + 1;
    return true;
}

static bool parse_dimension(parser *p, int64_t *out) {
    skip_space(p);
    if (p->at == p->end || *p->at < '0' || *p->at > '9')
        return malformed(p, "a dimension, a whole number from 0,");
    for (*out = 0; p->at < p->end && *p->at >= '0' && *p->at <= '9'; p->at++)
        if (__builtin_mul_overflow(*out, 10, out) || __builtin_add_overflow(*out, *p->at - '0', out))
            return malformed(p, "a dimension below 2^63");
    if (p->at < p->end && *p->at == 'L') /* Python 2's long */
        p->at++;
    return true;
}

static bool parse_shape(parser *p, npy_array *a) {
    bool comma = true;
    a->rank = 0;
    if (!take(p, '('))
        return malformed(p, "a tuple as 'shape'");
    while (!take(p, ')')) {
        if (!comma)
            return malformed(p, "',' or ')' in 'shape'");
        if (a->rank == NPY_MAX_RANK) {
            complain("%s: the array has more than %d dimensions", p->path, NPY_MAX_RANK);
            return false;
        }
        if (!parse_dimension(p, &a->shape[a->rank++]))
            return false;
        comma = take(p, ',');
    }
    return a->rank != 1 || comma || malformed(p, "',' after a shape's only dimension");
}

static bool parse_descr(parser *p, npy_array *a) {
    char descr[64];
    skip_space(p);
    if (p->at < p->end && (*p->at == '[' || *p->at == '(')) {
        complain("%s: it holds records; heddle reads float16, float32, float64, bool and int32", p->path);
        return false;
    }
    if (!parse_string(p, descr, sizeof descr))
        return false;
    for (int t = 0; t < TYPES; t++)
        if (!strcmp(descr, types[t].descr)) {
            a->type = (npy_type)t;
            return true;
        }
    if (descr[0] == '>' && descr[1] && descr[2] != '1')
        complain("%s: type '%s' is big-endian; heddle reads little-endian (in NumPy: a.astype('<%s'))", p->path, descr,
                 descr + 1);
    else
        complain("%s: type '%s' is none of '<f2', '<f4', '<f8', '|b1', '<i4' (float16 to float64, bool, int32)",
                 p->path, descr);
    return false;
}

static bool parse_order(parser *p) {
    if (take_word(p, "False"))
        return true;
    if (!take_word(p, "True"))
        return malformed(p, "True or False as 'fortran_order'");
    complain("%s: it is in Fortran order; heddle reads C order (in NumPy: numpy.ascontiguousarray(a))", p->path);
    return false;
}

static bool parse_header(parser *p, npy_array *a) {
    static const char *const keys[] = {"descr", "fortran_order", "shape", NULL};
    bool seen[3] = {false, false, false}, comma = true;
    if (!take(p, '{'))
        return malformed(p, "'{'");
    while (!take(p, '}')) {
        char key[32];
        int k = 0;
        if (!comma)
            return malformed(p, "',' or '}'");
        if (!parse_string(p, key, sizeof key))
            return false;
        while (keys[k] && strcmp(keys[k], key))
            k++;
        if (!keys[k] || seen[k])
            return malformed(p, "each of 'descr', 'fortran_order', 'shape' once");
        seen[k] = true;
        if (!take(p, ':'))
            return malformed(p, "':'");
        if (!(k == 0 ? parse_descr(p, a) : k == 1 ? parse_order(p) : parse_shape(p, a)))
            return false;
        comma = take(p, ',');
    }
    skip_space(p);
    if (p->at != p->end)
        return malformed(p, "nothing after '}'");
    return (seen[0] && seen[1] && seen[2]) || malformed(p, "each of 'descr', 'fortran_order', 'shape'");
}

/* --------------------------------------------------------------------------------------------------------- bytes */

static bool read_trouble(FILE *in, const char *path, const char *part) {
    if (ferror(in))
        complain("%s: %s", path, strerror(errno));
    else
        complain("%s: the file is truncated: it ends inside %s", path, part);
    return false;
}

static bool read_header(FILE *in, const char *path, npy_array *a) {
    unsigned char start[12];
    size_t got = fread(start, 1, 8, in);
    if (got < 8 && (ferror(in) || (got >= 6 && !memcmp(start, "\x93NUMPY", 6))))
        return read_trouble(in, path, "its header");
    if (got < 8 || memcmp(start, "\x93NUMPY", 6)) {
        complain("%s: it is not a .npy file", path);
        return false;
    }
    if (start[6] < 1 || start[6] > 3) {
        complain("%s: .npy version %d.%d is unknown; heddle reads versions 1 to 3", path, start[6], start[7]);
        return false;
    }
    size_t width = start[6] == 1 ? 2 : 4, length = 0;
    if (fread(start + 8, 1, width, in) != width)
        return read_trouble(in, path, "its header");
    for (size_t i = width; i-- > 0;)
        length = length << 8 | start[8 + i];
    if (length > MAX_HEADER) {
        complain("%s: malformed .npy header: its length is said to be %zu bytes", path, length);
        return false;
    }
    char *text = malloc(length + 1);
    if (!text)
        exit(complain("out of memory"));
    parser p = {path, text, text + length};
    bool ok = fread(text, 1, length, in) == length ? parse_header(&p, a) : read_trouble(in, path, "its header");
    free(text);
    return ok;
}

/* Grows with what is really there, so that a header that lies about its size costs nothing. */
static bool read_data(FILE *in, const char *path, size_t bytes, arena *m, npy_array *a) {
    size_t room = 0, got = 0;
    char *data = NULL;
    do {
        room = room == 0 ? (size_t)1 << 20 : room > SIZE_MAX / 2 ? SIZE_MAX : 2 * room;
        room = room > bytes ? bytes : room;
        char *more = realloc(data, room ? room : 1);
        if (!more) {
            free(data);
            exit(complain("%s: out of memory: %zu bytes were asked for", path, room));
        }
        data = more;
        got += fread(data + got, 1, room - got, in);
    } while (got == room && room < bytes);
    arena_adopt(m, data);
    a->data = data;
    if (got < bytes && ferror(in))
        return read_trouble(in, path, "its data");
    if (got < bytes)
        complain("%s: the file is truncated: its data ends after %zu of %zu bytes", path, got, bytes);
    else if (fgetc(in) != EOF)
        complain("%s: the file goes on after the %zu bytes of its data", path, bytes);
    return got == bytes && feof(in);
}

/* Of an empty array the other dimensions have to fit, too: strides are made of them. */
static bool array_bytes(const char *path, npy_array *a, size_t *bytes) {
    bool empty = false, fits = true;
    a->count = 1;
    for (int i = 0; i < a->rank; i++) {
        empty |= a->shape[i] == 0;
        fits = fits && !__builtin_mul_overflow(a->count, a->shape[i] ? a->shape[i] : 1, &a->count);
    }
    fits = fits && !__builtin_mul_overflow((size_t)a->count, npy_type_size(a->type), bytes) && *bytes <= PTRDIFF_MAX;
    if (empty) {
        a->count = 0;
        *bytes = 0;
    }
    if (fits)
        return true;
    complain("%s: the array is too large: its size in bytes is over 2^63", path);
    return false;
}

bool npy_read(arena *m, const char *path, npy_array *out) {
    size_t bytes;
    *out = (npy_array){0};
    FILE *in = fopen(path, "rb");
    if (!in) {
        complain("%s: %s", path, strerror(errno));
        return false;
    }
    bool ok = read_header(in, path, out) && array_bytes(path, out, &bytes) && read_data(in, path, bytes, m, out);
    fclose(in);
    return ok;
}
