from config.shakespeare_learned import *

out_dir = 'out/shakespeare_none'
wpe = 'none'
