"""The order written out from its specification: plain Python, one sample at a time."""

M = 2**64 - 1


def plain_splitmix64(x):
    z = (x + 0x9E3779B97F4A7C15) & M
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M
    return z ^ (z >> 31)


def plain_key(*parts):
    key = len(parts)
    for part in parts:
        key = plain_splitmix64(key ^ part)
    return key


def bits_of(n):
    bits = 0
    while 2**bits < n:
        bits += 1
    return bits


def plain_seeded_permutation(n, key):
    return sorted(range(n), key=lambda i: (plain_splitmix64(i ^ key) >> bits_of(n), i))


def plain_spread_order(n, key):
    """Digit by digit: the lowest bit of the place picks the half of the range, the next one its half ..."""
    out = []
    for place in range(2 ** bits_of(n) if n else 0):
        index = 0
        for level in range(bits_of(n)):
            swap = plain_splitmix64((2**level + index) ^ key) >> 63
            index = 2 * index + ((place >> level & 1) ^ swap)
        if index < n:
            out.append(index)
    rotation = plain_key(key, n) % n if n else 0
    return [out[i - rotation] for i in range(n)]


class PlainOrder:
    """`Order` with exchange=1 and any kind but "full"; `ramp`: of this epoch."""

    def __init__(self, table, kind, seed, epoch, window_blocks, num_lanes, ramp=False):
        self.num_lanes = num_lanes
        blocks = [b for b, count in enumerate(table) if count]
        rotation = 0
        if kind != "none":
            blocks = [blocks[i] for i in plain_spread_order(len(blocks), plain_key(seed, epoch, 1))]
            if num_lanes > 1:
                key = plain_key(seed, epoch, 6)
                rank = {i: (i // num_lanes, plain_splitmix64(i ^ key)) for i in range(len(blocks))}
                blocks = [blocks[i] for i in sorted(range(len(blocks)), key=rank.get)]
            rotation = plain_key(seed, epoch, 1, num_lanes) % num_lanes
        dealt = [[] for _ in range(num_lanes)]
        for b in blocks:
            min(dealt, key=len).extend((b, row) for row in range(table[b]))
        lanes = self._leveled(dealt, rotation, sum(table))
        self.windows = self._cut(lanes, [table[b] for b in blocks], window_blocks, num_lanes, ramp)
        if kind == "window":
            for w, cells in enumerate(self.windows):
                for lane, cell in enumerate(cells):
                    order = plain_seeded_permutation(len(cell), plain_key(seed, epoch, 2, lane, w))
                    cells[lane] = [cell[i] for i in order]

    @staticmethod
    def _leveled(dealt, rotation, n):
        count = len(dealt)
        quota = [len(range((lane + rotation) % count, n, count)) for lane in range(count)]
        over = [sample for lane, most in zip(dealt, quota, strict=True) for sample in lane[most:]]
        for lane, most in zip(dealt, quota, strict=True):
            del lane[most:]
            while len(lane) < most:
                lane.append(over.pop(0))
        return [dealt[(lane - rotation) % count] for lane in range(count)]

    @staticmethod
    def _cut(lanes, sizes, window_blocks, num_lanes, ramp):
        """Samples of each window as a list of cells, one a lane."""
        first, at, size = [], 0, max(8 if ramp is True else ramp or 0, num_lanes)
        is_whole = len(sizes) <= window_blocks
        while ramp and size < window_blocks and at < len(sizes):
            if is_whole and (ramp is True or len(sizes) - at < 2 * size):
                break
            first.append(at)
            at, size = at + size, size * 2
        rounds = len(range(at, len(sizes), num_lanes))
        count = len(range(at, len(sizes), window_blocks))
        first += [at + i * rounds // count * num_lanes for i in range(count)]
        bounds = [sum(sizes[:number]) for number in first]
        windows = [[[] for _ in lanes] for _ in bounds]
        for number, lane in enumerate(lanes):
            first = 0
            while first < len(lane):
                last = first
                while last < len(lane) and lane[last][0] == lane[first][0]:
                    last += 1
                window = max(w for w, s in enumerate(bounds) if (first + last) * num_lanes >= 2 * s)
                windows[window][number] += lane[first:last]
                first = last
        return [cells for cells in windows if any(cells)]

    def samples(self):
        """(block, row) of every position."""
        lanes = [[s for cells in self.windows for s in cells[lane]] for lane in range(self.num_lanes)]
        n = sum(map(len, lanes))
        return [lanes[p % self.num_lanes][p // self.num_lanes] for p in range(n)]


def chi_square(table):
    """Statistic divided by its standard deviation around its mean, for a doubly stochastic count table."""
    expected = table.sum() / table.size
    freedom = (table.shape[0] - 1) * (table.shape[1] - 1)
    return (((table - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5
