"""Random interleavings of the ring protocol of gluon_gelu.py: deadlocks, wrong or overwritten slots."""
import random
class Bar:
    def __init__(s, count): s.count = s.pending = count; s.tx = 0; s.phase = 0
    def done(s, parity): return s.phase & 1 != parity
    def check(s):
        if s.pending == 0 and s.tx == 0: s.phase += 1; s.pending = s.count
    def arrive(s): assert s.pending > 0; s.pending -= 1; s.check()
    def expect(s, n): assert s.pending > 0; s.tx += n; s.pending -= 1
    def complete(s): s.tx -= 1; s.check()
def nxt(i, p, S): return (0, p ^ 1) if i == S - 1 else (i + 1, p)
def run(tiles, P, steps, S, seed):
    rnd = random.Random(seed)
    for pid in range(min(P, tiles)):
        mine = list(range(pid, tiles, P))
        full, empty = [Bar(1) for _ in range(S)], [Bar(2) for _ in range(S)]
        A, B, flight = [None] * S, [None] * S, []
        def prod():
            i = p = 0
            for t in mine:
                for k in range(steps):
                    while not empty[i].done(p ^ 1): yield
                    full[i].expect(2); A[i] = B[i] = "torn"
                    flight.append((full[i], A, i, (t, k))); flight.append((full[i], B, i, (t, k)))
                    i, p = nxt(i, p, S); yield
        def cons(c):
            i = p = before = 0; inflight = []
            for t in mine:
                for k in range(steps):
                    while not full[i].done(p): yield
                    inflight.append((i, (t, k)))
                    for s, v in inflight: assert A[s] == v == B[s], (A[s], v)
                    yield  # epilogue
                    for s, v in inflight: assert A[s] == v == B[s]
                    inflight = inflight[-1:]
                    if k > 0: empty[before].arrive()
                    before = i; i, p = nxt(i, p, S)
                    yield
                for s, v in inflight: assert A[s] == v == B[s]
                inflight = []; empty[before].arrive(); yield
        alive, idle = [prod(), cons(0), cons(1)], 0
        while alive:
            if flight and rnd.random() < .4:
                b, arr, x, v = flight.pop(rnd.randrange(len(flight))); arr[x] = v; b.complete(); idle = 0
            g = rnd.choice(alive)
            try: next(g)
            except StopIteration: alive.remove(g); idle = 0
            idle += 1
            assert idle < 20000, "deadlock"
n = 0
for tiles in (1, 2, 3, 4, 7, 24):
    for P in (1, 3, 4):
        for steps in (1, 2, 3, 12):
            for S in (2, 3, 6):
                for seed in range(3): run(tiles, P, steps, S, seed); n += 1
print("protocol fine,", n, "runs")
# every tile once, within the matrix
for tm in (1, 3, 5, 67, 133, 512):
    for tn in (1, 2, 3, 12):
        for G in (1, 4, 8):
            seen = set()
            for t in range(tm * tn):
                first = t // (G * tn) * G; num = t % (G * tn); size = min(tm - first, G)
                seen.add((first + num % size, num // size))
            assert seen == {(r, c) for r in range(tm) for c in range(tn)}
print("tiles fine")
