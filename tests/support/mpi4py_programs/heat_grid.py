"""Heat in a square plate, cut into a grid of blocks: an ordinary mpi4py program."""

import numpy as np
from mpi4py import MPI

N, STEPS = 48, 60

world = MPI.COMM_WORLD
dims = MPI.Compute_dims(world.Get_size(), 2)
cart = world.Create_cart(dims, periods=[False, False])
row, column = cart.Get_coords(cart.Get_rank())
up, down = cart.Shift(0, 1)
left, right = cart.Shift(1, 1)

rows, columns = N // dims[0], N // dims[1]
u = np.zeros((rows + 2, columns + 2))
if row == 0:
    u[0, :] = 100.0

line = MPI.DOUBLE.Create_vector(rows, 1, columns + 2).Commit()  # a column of the block
flat = u.reshape(-1)
width = columns + 2

start = MPI.Wtime()
for _ in range(STEPS):
    cart.Sendrecv(u[1].copy(), dest=up, recvbuf=u[-1], source=down)
    cart.Sendrecv(u[-2].copy(), dest=down, recvbuf=u[0], source=up)
    first, last = flat[width + 1 :], flat[width + columns :]
    halo_left, halo_right = flat[width:], flat[width + columns + 1 :]
    cart.Sendrecv([first, 1, line], left, 1, [halo_right, 1, line], right, 1)
    cart.Sendrecv([last, 1, line], right, 2, [halo_left, 1, line], left, 2)
    around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
    u[1:-1, 1:-1] = around / 4
line.Free()

heat = cart.reduce(float(u[1:-1, 1:-1].sum()), op=MPI.SUM, root=0)
hottest = np.zeros(1)
cart.Reduce(u[1:-1, 1:-1].max().reshape(1), hottest, op=MPI.MAX, root=0)
if cart.Get_rank() == 0:
    print(f"heat {heat:.6f} hottest {hottest[0]:.6f} in {MPI.Wtime() - start >= 0}")
