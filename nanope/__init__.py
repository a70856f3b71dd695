"""What the scripts share. Import it before torch: OpenMP reads how its threads wait once, when it is loaded."""
import os

# Threads that wait sleep. By default they spin, and when anything else runs on the cores, training falls to a tenth of its speed.
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')
