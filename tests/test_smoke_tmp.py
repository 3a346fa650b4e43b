import pytest, torch, torch.distributed as dist
def w(rank, n, k):
    t = torch.ones(2); dist.all_reduce(t); assert t[0] == n; assert k == 5
def bad(rank, n):
    raise ValueError("xx%d" % rank)
@pytest.mark.processes
def test_a(run_ranks):
    run_ranks(w, 2, 5)
@pytest.mark.processes
def test_b(run_ranks):
    with pytest.raises(Exception, match="xx"):
        run_ranks(bad, 2)
