"""What the scripts share. Import it before torch: OpenMP reads how its threads wait once, when it is loaded."""
import os

# Threads that wait spin for some microseconds, then sleep. By default they spin on, and when anything else runs on the cores, training
# falls to a tenth of its speed; without spinning at all small models take half as long again.
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')
os.environ.setdefault('GOMP_SPINCOUNT', '1000')
