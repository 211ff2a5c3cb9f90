// For kernels whose blocks do one item of packed sequences: the first warp finds it, and leaves it at the end of shared memory,
// where all threads read it now and when the output is stored: remembering it would cost the loop some registers.
constexpr int NOTE_BYTES = 64;

struct Note {
    SharedArray<int> words{smem_base() + SMEM_BYTES - NOTE_BYTES};
    DEVICE Note() {}
    DEVICE void write(const Work& work) const {
        const int values[] = {work.number, work.key_begin, work.key_end, work.diagonal, work.head_kv, work.head_begin,
                              work.head_count, work.query_begin, work.query_end};
        static_assert(sizeof(values) == sizeof(Work) && sizeof(Work) <= NOTE_BYTES, "all of it");
#pragma unroll
        for (int i = 0; i < int(sizeof(values) / 4); ++i) words.set(i, values[i]);
    }
    DEVICE Work read() const {
        Work work;
        work.number = words.get(0), work.key_begin = words.get(1), work.key_end = words.get(2), work.diagonal = words.get(3);
        work.head_kv = words.get(4), work.head_begin = words.get(5), work.head_count = words.get(6);
        work.query_begin = words.get(7), work.query_end = words.get(8);
        return work;
    }
};

DEVICE Work find_work(const Params& p) {
    const Note note;
    if (warp_id() == 0) {
        const Work found = Walk(p).find(p, block_id());
        if (lane_id() == 0) note.write(found);
    }
    sync_block();
    return note.read();
}
DEVICE bool has_work(const Work& work) { return work.exists(); }  // the grid is made for the worst lengths
DEVICE Mask mask_of(const Params& p, const Work& work) { return Mask(p, work); }
