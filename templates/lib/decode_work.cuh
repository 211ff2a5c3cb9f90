// What softmax asks of the rows.
struct Work {
    const Params& p;
    const Rows& rows;
    DEVICE int query(int row) const { return rows.query(p, row); }
//% if alibi
    DEVICE int head(int row) const { return rows.head(p, row); }
//% endif
};
