from config.shakespeare_learned import *

out_dir = 'out/shakespeare_sinusoidal'
wpe = 'sinusoidal'
