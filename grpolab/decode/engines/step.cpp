// A decode step of a Llama-shaped model, one token for each of n rows, by one team of threads across all layers.
//
// H key/value heads, g queries a head, D head size, E hidden, F inner size, V vocabulary. T is float or bf16; sums are fp32,
// and bf16 is rounded where the forward of transformers rounds. Each row is computed by the same operations in the same order
// whatever the other rows are. Weights (outputs, inputs) lie in strips of 32 outputs: (outputs/32, inputs, 32), and in bf16
// (outputs/32, inputs/2, 32, 2), which AMX takes as its tiles; keys and values in the pages of decode/cache.py.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <omp.h>
#include <sys/mman.h>
#include <thread>
#include <type_traits>
#include <vector>
#if defined(__AVX512BF16__) || defined(__AMX_BF16__)
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__AVX512F__)
constexpr long LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr long LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr long LANES = 4, REGISTERS = 32;
#else
constexpr long LANES = 4, REGISTERS = 16;
#endif
constexpr long STRIP = 32, PAGE = 32, VECS = STRIP / LANES;
constexpr int ROWS = REGISTERS * 3 / 4 / VECS;  // of x that a strip is multiplied with at once: their sums fill the registers

#define VECTOR(type, bytes) __attribute__((vector_size(bytes), aligned(sizeof(type)), may_alias)) type
typedef VECTOR(float, LANES * 4) Vec;  // as wide as the processor's own: wider ones the compiler takes apart badly
typedef VECTOR(int32_t, LANES * 4) Ints;
typedef VECTOR(uint32_t, LANES * 4) Bits;
typedef VECTOR(uint16_t, LANES * 2) Halves;
struct bf16 { uint16_t bits; };

// --- numbers -----------------------------------------------------------------------------------------------------------

inline Vec load(const float* p) { return *(const Vec*)p; }
inline Vec load(const bf16* p) { return (Vec)(__builtin_convertvector(*(const Halves*)p, Bits) << 16); }
inline Bits upper(Vec v) {
    Bits b = (Bits)v;
    return v == v ? (b + 0x7fff + (b >> 16 & 1)) & 0xffff0000 : Bits{} + 0x7fc00000;
}
inline void store(float* p, Vec v) { *(Vec*)p = v; }
inline void store(bf16* p, Vec v) { *(Halves*)p = __builtin_convertvector(upper(v) >> 16, Halves); }
template <class T> inline Vec rounded(Vec v) { return std::is_same<T, float>::value ? v : (Vec)upper(v); }

inline float get(float x) { return x; }
inline float get(bf16 x) { uint32_t b = uint32_t(x.bits) << 16; float f; memcpy(&f, &b, 4); return f; }
inline void put(float& to, float x) { to = x; }
inline void put(bf16& to, float x) {
    uint32_t b; memcpy(&b, &x, 4);
    to.bits = x == x ? (b + 0x7fff + (b >> 16 & 1)) >> 16 : 0x7fc0;
}
template <class T> inline float rounded(float x) { T t; put(t, x); return get(t); }

inline float sum(Vec v) { float s = 0; for (long i = 0; i < LANES; i++) s += v[i]; return s; }

inline Vec vexp(Vec x) {  // expf of Cephes: relative error below 2e-7
    const float shift = 12582912.0f;  // 1.5 * 2^23: its sum with a number is rounded to an integer
    Vec in = x > 88.3f ? Vec{} + 88.3f : x;
    Vec t = in * 1.44269504f + shift, n = t - shift;
    Vec r = in - n * 0.693359375f + n * 2.12194440e-4f;
    Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Vec scale = (Vec)(((Ints)t << 23) + 0x3f800000);
    return x < -87.3f ? Vec{} : p * scale;
}

// --- products ----------------------------------------------------------------------------------------------------------

template <class T> constexpr long INPUTS = std::is_same<T, float>::value ? 1 : 2;  // that a strip keeps together

// Row by row: the sums and one input of all rows would not fit the registers.
template <int R> inline void add(Vec (&acc)[R][VECS], const float* w, const float* x, long stride) {
    Vec weight[VECS];
    for (long j = 0; j < VECS; j++) weight[j] = load(w + j * LANES);
    for (int r = 0; r < R; r++)
        for (long j = 0; j < VECS; j++) acc[r][j] += weight[j] * x[r * stride];
}
template <int R> inline void add(Vec (&acc)[R][VECS], const bf16* w, const bf16* x, long stride) {
#ifdef __AVX512BF16__
    __m512bh weight[VECS];
    for (long j = 0; j < VECS; j++) weight[j] = (__m512bh)_mm512_loadu_si512(w + 2 * j * LANES);
    for (int r = 0; r < R; r++) {
        int32_t two; memcpy(&two, x + r * stride, 4);
        for (long j = 0; j < VECS; j++)
            acc[r][j] = (Vec)_mm512_dpbf16_ps((__m512)acc[r][j], weight[j], (__m512bh)_mm512_set1_epi32(two));
    }
#else
    for (long j = 0; j < VECS; j++) {
        Bits pair = *(const Bits*)(w + 2 * j * LANES);
        Vec first = (Vec)(pair << 16), second = (Vec)(pair & 0xffff0000);
        for (int r = 0; r < R; r++) {
            acc[r][j] += first * get(x[r * stride]);
            acc[r][j] += second * get(x[r * stride + 1]);
        }
    }
#endif
}

// Apart from what becomes of the sums, whose constants would take their registers.
template <int R, class T> __attribute__((noinline)) void multiplied(Vec (&y)[R][VECS], const T* w, const T* x, long inputs) {
    Vec acc[R][VECS] = {};
    for (long i = 0; i < inputs; i += INPUTS<T>) add<R>(acc, w + i * STRIP, x + i, inputs);
    memcpy(y, acc, sizeof(acc));
}

template <class Emit>
inline void finish(Vec (*y)[VECS], long count, const float* bias, long row, long strip, Emit& emit) {
    for (long r = 0; r < count; r++) {
        for (long j = 0; bias && j < VECS; j++) y[r][j] += load(bias + strip * STRIP + j * LANES);
        emit(row + r, strip * STRIP, y[r]);
    }
}

template <int R, class T, class Emit>
inline long rows(const T* w, const float* bias, const T* x, long inputs, long row, long strip, Emit& emit) {
    Vec acc[R][VECS];
    multiplied<R>(acc, w, x + row * inputs, inputs);
    finish(acc, R, bias, row, strip, emit);
    return R;
}

#ifdef __AMX_BF16__
// Tiles of 16 rows by 64 bytes, which the system lets a process use that asks for them.
inline bool tiles() {
    static bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
    return granted;
}
inline void shape_tiles(long rows) {  // 0 to 3 sums, 4 and 5 of x, 6 and 7 of the weights
    struct { uint8_t palette = 1, start = 0, unused[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; } shape;
    long above = std::min(rows, 16L), below = std::max(rows - 16, 1L);
    for (int t = 0; t < 8; t++) shape.bytes[t] = 64, shape.rows[t] = t > 5 ? 16 : t == 2 || t == 3 || t == 5 ? below : above;
    _tile_loadconfig(&shape);
}
// y (rows, 32) of up to 32 rows: the sums of a row are the same at every number of rows
inline void tiled(float* y, const bf16* w, const bf16* x, long inputs, long rows) {
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (long i = 0; i < inputs; i += 32) {
        _tile_loadd(6, w + i * STRIP, 4 * STRIP);
        _tile_loadd(7, w + i * STRIP + 32, 4 * STRIP);
        _tile_loadd(4, x + i, 2 * inputs);
        _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7);
        if (rows <= 16) continue;
        _tile_loadd(5, x + 16 * inputs + i, 2 * inputs);
        _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, y, 4 * STRIP); _tile_stored(1, y + 16, 4 * STRIP);
    if (rows > 16) { _tile_stored(2, y + 16 * STRIP, 4 * STRIP); _tile_stored(3, y + 16 * STRIP + 16, 4 * STRIP); }
}
template <class Emit>
inline bool product_in_tiles(const bf16* weight, const float* bias, const bf16* x, long inputs, long n, long first, long last,
                             Emit emit) {
    if (inputs % 32 || !tiles()) return false;
    alignas(64) Vec y[32][VECS];
    long shaped = 0;
    for (long strip = first; strip < last; strip++)
        for (long row = 0; row < n; row += 32) {
            long count = std::min(n - row, 32L);
            if (count != shaped) shape_tiles(shaped = count);
            tiled((float*)y, weight + strip * inputs * STRIP, x + row * inputs, inputs, count);
            finish(y, count, bias, row, strip, emit);
        }
    _tile_release();
    return true;
}
#endif

// emit(row, output, y of the 32 outputs from there) for strips first..last-1 of x (n, inputs) W^T + bias
template <class T, class Emit>
inline void product(const T* weight, const float* bias, const T* x, long inputs, long n, long first, long last, Emit emit) {
#ifdef __AMX_BF16__
    if constexpr (std::is_same<T, bf16>::value)
        if (product_in_tiles(weight, bias, x, inputs, n, first, last, emit)) return;
#endif
    for (long strip = first; strip < last; strip++) {
        const T* w = weight + strip * inputs * STRIP;
        for (long r = 0; r < n;) {
            long left = n - r;
            if (left >= ROWS) r += rows<ROWS>(w, bias, x, inputs, r, strip, emit);
            else if (left >= 6 && ROWS > 6) r += rows<6>(w, bias, x, inputs, r, strip, emit);
            else if (left >= 4 && ROWS > 4) r += rows<4>(w, bias, x, inputs, r, strip, emit);
            else if (left >= 2 && ROWS > 2) r += rows<2>(w, bias, x, inputs, r, strip, emit);
            else r += rows<1>(w, bias, x, inputs, r, strip, emit);
        }
    }
}

// --- a step ------------------------------------------------------------------------------------------------------------

struct Layer {  // products: qkv, out, gate and up, down; norms: before qkv, before gate and up, of queries, of keys
    const void* weight[4];
    const float* bias[4];
    const void* norm[4];
};

struct Model {
    long layers, heads, groups, size, hidden, inner, vocab, bf16;
    float eps, scaling;
    const void *embedding, *norm, *head;
    const float* head_bias;
    const Layer* layer;
};

struct Step {
    long n, blocks, layer_stride;  // columns of `table`; numbers of keys (and of values) in a layer
    const int64_t *token, *position, *table;
    void *keys, *values;
    const void* rotation[2];
    float* logits;  // (n, V rounded up to strips)
    long threads, piece;  // rows that a thread takes through all layers alone; 0: the threads share each product
    long drafts;  // whether rows share their pages, one position after the other
};

struct Barrier {  // the threads of a step wait for each other for microseconds: too short to sleep
    std::atomic<long> waiting{0}, round{0};
    void wait(long threads) {
        long now = round.load(std::memory_order_relaxed);
        if (waiting.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
            waiting.store(0, std::memory_order_relaxed);
            round.store(now + 1, std::memory_order_release);
            return;
        }
        for (long spins = 0; round.load(std::memory_order_acquire) == now; spins++)
            if (spins > 1000) std::this_thread::yield();  // a processor that others use, too
#if defined(__x86_64__)
            else __builtin_ia32_pause();
#endif
    }
};

template <class T> void normalise(const T* x, const T* weight, T* y, long n, long hidden, float eps) {
    for (long r = 0; r < n; r++, x += hidden, y += hidden) {
        Vec squares = {};
        for (long i = 0; i < hidden; i += LANES) { Vec v = load(x + i); squares += v * v; }
        float scale = 1 / std::sqrt(sum(squares) / hidden + eps);
        for (long i = 0; i < hidden; i += LANES) {
            Vec v = rounded<T>(load(x + i) * scale);
            store(y + i, weight ? v * load(weight + i) : v);
        }
    }
}

// In fp32 the two numbers that turn together are neighbours and `a` is cos + i sin; in bf16 they are half a head apart, `a` is
// cos and `b` sin with the sign of rotate_half.
inline void rotate(float* x, const float* a, const float*, long size) {
    for (long i = 0; i < size; i += 2) {
        float re = x[i], im = x[i + 1];
        x[i] = re * a[i] - im * a[i + 1];
        x[i + 1] = re * a[i + 1] + im * a[i];
    }
}
inline void rotate(bf16* x, const bf16* a, const bf16* b, long size) {
    long half = size / 2;
    for (long i = 0; i < half; i++) {
        float low = get(x[i]), high = get(x[i + half]);
        put(x[i], rounded<bf16>(low * get(a[i])) + rounded<bf16>(high * get(b[i])));
        put(x[i + half], rounded<bf16>(high * get(a[i + half])) + rounded<bf16>(low * get(b[i + half])));
    }
}

template <int N, class T> inline void weighted(const float* weights, const T* values, long count, long stride, Vec* out) {
    Vec acc[N];
    for (int j = 0; j < N; j++) acc[j] = out[j];
    for (long t = 0; t < count; t++)
        for (int j = 0; j < N; j++) acc[j] += load(values + t * stride + j * LANES) * weights[t];
    for (int j = 0; j < N; j++) out[j] = acc[j];
}

// One row and key/value head: h (g + 2, D) of queries, key, value are turned by their position; key and value go to their page.
template <class T> void extend(const Model& m, const Step& s, long layer, long row, long head, T* h) {
    long size = m.size, position = s.position[row], offset = position % PAGE, page = s.table[row * s.blocks + position / PAGE];
    const T *a = (const T*)s.rotation[0] + position * size, *b = (const T*)s.rotation[1] + position * size;
    for (long q = 0; q <= m.groups; q++) {
        const T* norm = (const T*)m.layer[layer].norm[q < m.groups ? 2 : 3];
        if (norm) normalise(h + q * size, norm, h + q * size, 1, size, m.eps);
        rotate(h + q * size, a, b, size);
    }
    const T *key = h + m.groups * size, *value = key + size;
    T* keys = (T*)s.keys + layer * s.layer_stride + (page * m.heads + head) * size * PAGE + offset;
    for (long d = 0; d < size; d++) keys[d * PAGE] = key[d];
    std::copy(value, value + size, (T*)s.values + layer * s.layer_stride + ((page * m.heads + head) * PAGE + offset) * size);
}

// Its queries over the positions up to its own: out (g, D). `scores` and `sums` are room.
template <class T>
void attend(const Model& m, const Step& s, long layer, long row, long head, const T* h, T* out, float* scores, Vec* sums) {
    long size = m.size, position = s.position[row], blocks = position / PAGE + 1;
    const int64_t* pages = s.table + row * s.blocks;
    const T *keys = (const T*)s.keys + layer * s.layer_stride, *values = (const T*)s.values + layer * s.layer_stride;
    for (long q = 0; q < m.groups; q++) {
        const T* query = h + q * size;
        float top = -std::numeric_limits<float>::infinity();
        for (long block = 0; block < blocks; block++) {
            const T* k = keys + (pages[block] * m.heads + head) * size * PAGE;
            Vec dot[PAGE / LANES] = {};
            for (long d = 0; d < size; d++) {
                float x = get(query[d]);
                for (long j = 0; j < PAGE / LANES; j++) dot[j] += load(k + d * PAGE + j * LANES) * x;
            }
            for (long j = 0; j < PAGE / LANES; j++)
                store(scores + block * PAGE + j * LANES, rounded<T>(rounded<T>(dot[j]) * m.scaling));
        }
        for (long t = position + 1; t < blocks * PAGE; t++) scores[t] = -std::numeric_limits<float>::infinity();
        Vec tops = Vec{} + top, total = {};
        for (long t = 0; t < blocks * PAGE; t += LANES) { Vec v = load(scores + t); tops = v > tops ? v : tops; }
        for (long i = 0; i < LANES; i++) top = std::max(top, tops[i]);
        for (long t = 0; t < blocks * PAGE; t += LANES) {
            Vec v = vexp(load(scores + t) - top);
            total += v;
            store(scores + t, v);
        }
        float scale = 1 / sum(total);
        for (long t = 0; t < blocks * PAGE; t += LANES) store(scores + t, rounded<T>(load(scores + t) * scale));
        std::fill(sums, sums + size / LANES, Vec{});
        for (long block = 0; block < blocks; block++) {
            const T* v = values + (pages[block] * m.heads + head) * PAGE * size;
            long count = std::min(PAGE, position + 1 - block * PAGE), j = 0;
            for (; j + 8 <= size / LANES; j += 8) weighted<8>(scores + block * PAGE, v + j * LANES, count, size, sums + j);
            for (; j + 4 <= size / LANES; j += 4) weighted<4>(scores + block * PAGE, v + j * LANES, count, size, sums + j);
            for (; j + 2 <= size / LANES; j += 2) weighted<2>(scores + block * PAGE, v + j * LANES, count, size, sums + j);
            for (; j < size / LANES; j++) weighted<1>(scores + block * PAGE, v + j * LANES, count, size, sums + j);
        }
        for (long j = 0; j < size / LANES; j++) store(out + q * size + j * LANES, sums[j]);
    }
}

template <class T> void step(const Model& m, const Step& s) {
    long n = s.n, width = m.heads * (m.groups + 2) * m.size, queries = m.heads * m.groups * m.size, E = m.hidden, F = m.inner;
    std::vector<T> x(n * E), h(n * width), attended(n * queries), inner(n * F);
    for (long r = 0; r < n; r++) std::copy_n((const T*)m.embedding + s.token[r] * E, E, &x[r * E]);
    Barrier barrier;
#pragma omp parallel num_threads(s.threads)
    {
        long me = omp_get_thread_num(), threads = omp_get_num_threads();
        auto first = [&](long total) { return total * me / threads; };
        auto last = [&](long total) { return total * (me + 1) / threads; };
        std::vector<T> normed(n * E);
        std::vector<float> scores(s.blocks * PAGE);
        std::vector<Vec> sums(m.size / LANES);
        auto residual = [&](long r, long o, const Vec* y) {
            T* to = &x[r * E + o];
            for (long j = 0; j < VECS; j++) store(to + j * LANES, load(to + j * LANES) + rounded<T>(y[j]));
        };
        auto multiply = [&](const Layer& l, int which, const T* from, long inputs, long outputs, auto emit) {
            long begin = first(outputs / STRIP), end = last(outputs / STRIP);
            product((const T*)l.weight[which], l.bias[which], from, inputs, n, begin, end, emit);
            barrier.wait(threads);
        };
        for (long i = 0; i < m.layers; i++) {
            const Layer& l = m.layer[i];
            normalise(x.data(), (const T*)l.norm[0], normed.data(), n, E, m.eps);
            multiply(l, 0, normed.data(), E, width, [&](long r, long o, const Vec* y) {
                for (long j = 0; j < VECS; j++) store(&h[r * width + o + j * LANES], y[j]);
            });
            auto items = [&](auto work) {
                for (long item = first(n * m.heads); item < last(n * m.heads); item++)
                    work(item, item / m.heads, item % m.heads, &h[item * (m.groups + 2) * m.size]);
            };
            items([&](long, long row, long head, T* of) { extend(m, s, i, row, head, of); });
            if (s.drafts) barrier.wait(threads);  // rows of one sequence read what the others have written
            items([&](long item, long row, long head, const T* of) {
                attend(m, s, i, row, head, of, &attended[item * m.groups * m.size], scores.data(), sums.data());
            });
            barrier.wait(threads);
            multiply(l, 1, attended.data(), queries, E, residual);
            normalise(x.data(), (const T*)l.norm[1], normed.data(), n, E, m.eps);
            multiply(l, 2, normed.data(), E, 2 * F, [&](long r, long o, const Vec* y) {  // half a strip of the gate, half of the product's other factor
                for (long j = 0; j < VECS / 2; j++) {
                    Vec gate = rounded<T>(y[j]);
                    store(&inner[r * F + o / 2 + j * LANES],
                          rounded<T>(gate / (1.0f + vexp(-gate))) * rounded<T>(y[j + VECS / 2]));
                }
            });
            multiply(l, 3, inner.data(), F, E, residual);
        }
        normalise(x.data(), (const T*)m.norm, normed.data(), n, E, m.eps);
        long strips = (m.vocab + STRIP - 1) / STRIP;
        product((const T*)m.head, m.head_bias, normed.data(), E, n, first(strips), last(strips),
                [&](long r, long o, const Vec* y) {
            for (long j = 0; j < VECS; j++) store(s.logits + r * strips * STRIP + o + j * LANES, rounded<T>(y[j]));
        });
    }
}

// Threads share the strips, or the rows where the strips are few; x is taken in pieces that stay near the processor.
template <class T>
void linear(const T* w, const float* bias, const T* x, T* y, long n, long inputs, long outputs, long threads) {
    long strips = (outputs + STRIP - 1) / STRIP, piece = std::max(long(ROWS), (1L << 18) / long(inputs * sizeof(T)) / ROWS * ROWS);
#pragma omp parallel num_threads(threads)
    {
        long me = omp_get_thread_num(), team = omp_get_num_threads();
        bool by_row = strips < 4 * team;
        auto share = [&](long total, bool shared, long t) { return shared ? total * t / team : total * (t > me); };
        long last = share(n, by_row, me + 1);
        for (long r = share(n, by_row, me); r < last; r += piece)
            product(w, bias, x + r * inputs, inputs, std::min(piece, last - r), share(strips, !by_row, me),
                    share(strips, !by_row, me + 1), [&](long row, long o, const Vec* sums) {
                for (long j = 0; j < VECS; j++) store(y + (r + row) * strips * STRIP + o + j * LANES, sums[j]);
            });
    }
}

// (outputs, words) into strips (outputs/32, words, 32) of words of 4 bytes: one fp32 number, two of bf16
extern "C" void grpolab_pack(const uint32_t* weight, uint32_t* table, long outputs, long words, long threads) {
    const long huge = 1L << 21, strips = (outputs + STRIP - 1) / STRIP, bytes = strips * words * STRIP * 4;
    uintptr_t begin = ((uintptr_t)table + huge - 1) & -huge, end = ((uintptr_t)table + bytes) & -huge;
    if (begin < end) madvise((void*)begin, end - begin, MADV_HUGEPAGE);  // a step walks all of it
#pragma omp parallel for num_threads(threads)
    for (long strip = 0; strip < strips; strip++)
        for (long from = 0; from < words; from += LANES)
            for (long o = 0; o < STRIP; o++)
                for (long i = from; i < std::min(words, from + LANES); i++)
                    table[(strip * words + i) * STRIP + o] =
                        strip * STRIP + o < outputs ? weight[(strip * STRIP + o) * words + i] : 0;
}

static void step_of(const Model& m, const Step& s) { m.bf16 ? step<bf16>(m, s) : step<float>(m, s); }

extern "C" void grpolab_step(const Model* m, const Step* s) {
    if (!s->piece) return step_of(*m, *s);  // not inside a region of one thread: a nested one starts new threads every time
    long width = (m->vocab + STRIP - 1) / STRIP * STRIP;
#pragma omp parallel for schedule(dynamic) num_threads(s->threads)
    for (long r = 0; r < s->n; r += s->piece) {
        Step part = *s;
        part.n = std::min(s->piece, s->n - r), part.threads = 1;
        part.token += r, part.position += r, part.table += r * s->blocks, part.logits += r * width;
        step_of(*m, part);
    }
}

extern "C" void grpolab_linear(long is_bf16, long n, long inputs, long outputs, const void* w, const float* bias, const void* x,
                               void* y, long threads) {
    if (is_bf16) linear((const bf16*)w, bias, (const bf16*)x, (bf16*)y, n, inputs, outputs, threads);
    else linear((const float*)w, bias, (const float*)x, (float*)y, n, inputs, outputs, threads);
}
