/* SPDX-License-Identifier: Apache-2.0
 *
 * The text of train_gpt.c: the source files below a directory, in sorted order, as symbols of a small vocabulary. */
#ifndef TRAIN_GPT_TEXT_H
#define TRAIN_GPT_TEXT_H

#include <dirent.h>
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { TEXT_CHUNK = 4096, TEXT_HELD_OUT = 10, TEXT_RARE = 16, TEXT_FILE_LIMIT = 1 << 20 };

typedef struct byte_list {
    uint8_t *data;
    size_t n, room;
} byte_list;

typedef struct path_list {
    char **path;
    size_t n, room;
} path_list;

/* Every tenth chunk of 4096 characters is held out: the model never sees it in training. */
typedef struct gpt_text {
    byte_list train, held_out; /* symbols */
    size_t files;
    int vocabulary;      /* the last symbol stands for every rare character */
    char letter[128];    /* of a symbol */
    uint8_t symbol[128]; /* of an ASCII character */
} gpt_text;

/* Room for n more elements of `size` bytes. */
static void *grow(void *data, size_t n, size_t *room, size_t more, size_t size) {
    if (n + more <= *room)
        return data;
    *room = 2 * (n + more);
    void *larger = realloc(data, *room * size);
    if (!larger) {
        fprintf(stderr, "train_gpt: out of memory: %zu bytes more were wanted\n", *room * size);
        exit(2);
    }
    return larger;
}

static bool is_source(const char *name) {
    static const char *const endings[] = {".c", ".h", ".md", ".sh", ".txt", ".py", ".cu", ".cuh", ".def", ".cmake"};
    const char *dot = strrchr(name, '.');
    for (size_t i = 0; dot && i < sizeof endings / sizeof *endings; i++)
        if (strcmp(dot, endings[i]) == 0)
            return true;
    return false;
}

static int by_name(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Adds the source files below `path`, without hidden and build directories and without following links. */
static void find_files(const char *path, path_list *found, bool top) {
    DIR *directory = opendir(path);
    if (!directory) {
        fprintf(stderr, "train_gpt: cannot read the directory %s: %s%s\n", path, strerror(errno),
                top ? "" : "; going on without it");
        if (top)
            exit(2);
        return;
    }
    for (struct dirent *entry; (entry = readdir(directory));) {
        struct stat info;
        const size_t length = strlen(path) + strlen(entry->d_name) + 2;
        if (entry->d_name[0] == '.')
            continue;
        char *full = grow(NULL, 0, &(size_t){0}, length, 1);
        snprintf(full, length, "%s/%s", path, entry->d_name);
        if (lstat(full, &info) == 0 && S_ISDIR(info.st_mode) && strncmp(entry->d_name, "build", 5) != 0)
            find_files(full, found, false);
        if (lstat(full, &info) == 0 && S_ISREG(info.st_mode) && info.st_size <= TEXT_FILE_LIMIT &&
            is_source(entry->d_name)) {
            found->path = grow(found->path, found->n, &found->room, 1, sizeof *found->path);
            found->path[found->n++] = full;
        } else {
            free(full);
        }
    }
    closedir(directory);
}

/* Appends the file's characters as ASCII, one 0x7f for each that is not; false, and nothing appended, if it
 * holds a zero byte or cannot be read. */
static bool append_file(const char *path, byte_list *text) {
    FILE *file = fopen(path, "rb");
    const size_t before = text->n;
    bool good = file != NULL;
    for (int c; good && (c = getc(file)) != EOF;) {
        text->data = grow(text->data, text->n, &text->room, 1, 1);
        if (c == 0)
            good = false;
        else if (c < 0x7f && c != '\r')
            text->data[text->n++] = (uint8_t)c;
        else if (c >= 0xc0) /* the first byte of a UTF-8 character; the others are passed over */
            text->data[text->n++] = 0x7f;
    }
    if (!good || ferror(file)) {
        good = false;
        text->n = before;
        fprintf(stderr, "train_gpt: leaving out %s: %s\n", path, file ? "not text" : strerror(errno));
    }
    if (file)
        fclose(file);
    return good;
}

static void number_characters(gpt_text *text, const byte_list *raw) {
    size_t count[128] = {0};
    for (size_t i = 0; i < raw->n; i++)
        count[raw->data[i]]++;
    for (int c = 0; c < 0x7f; c++)
        if (count[c] >= TEXT_RARE)
            text->letter[text->vocabulary++] = (char)c;
    memset(text->symbol, text->vocabulary, sizeof text->symbol);
    for (int i = 0; i < text->vocabulary; i++)
        text->symbol[(int)text->letter[i]] = (uint8_t)i;
    text->letter[text->vocabulary++] = '?';
}

/* Reads all text below `path`; the program ends here if fewer than `least` characters are there to train on or to hold
 * out. */
static gpt_text read_text(const char *path, size_t least) {
    gpt_text text = {.files = 0};
    path_list found = {.n = 0};
    byte_list raw = {.n = 0};
    find_files(path, &found, true);
    if (found.n)
        qsort(found.path, found.n, sizeof *found.path, by_name);
    for (size_t i = 0; i < found.n; i++) {
        text.files += append_file(found.path[i], &raw);
        free(found.path[i]);
    }
    free(found.path);
    number_characters(&text, &raw);
    for (size_t i = 0; i < raw.n; i++) {
        byte_list *to = i / TEXT_CHUNK % TEXT_HELD_OUT == TEXT_HELD_OUT / 2 ? &text.held_out : &text.train;
        to->data = grow(to->data, to->n, &to->room, 1, 1);
        to->data[to->n++] = text.symbol[raw.data[i]];
    }
    free(raw.data);
    if (text.train.n < least || text.held_out.n < least) {
        fprintf(stderr,
                "train_gpt: too little text in %s: %zu characters of %zu source files to train on and %zu held out; ",
                path, text.train.n, text.files, text.held_out.n);
        fprintf(stderr, "at least %zu are needed for each\n", least);
        exit(2);
    }
    return text;
}

#endif
