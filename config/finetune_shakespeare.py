# GPT-2 124M, with OpenAI's weights, fine-tuned on Shakespeare's plays. The weights need the network once; the data do not:
# python prepare.py shakespeare_gpt2 --input=data/shakespeare/plays --tokenizer=gpt2
dataset = 'shakespeare_gpt2'
out_dir = 'out/finetune_shakespeare'
init_from = 'gpt2'  # or gpt2-medium, gpt2-large, gpt2-xl; sizes, context and position table come with the weights
dropout = 0.1       # a small text, seen more than once

batch_size = 1
gradient_accumulation_steps = 32  # 32 * 1,024 tokens an update
max_iters = 200
learning_rate = 3e-5  # small: the weights are good already
warmup_iters = 10
checkpoint_blocks = False  # True where memory is short

eval_interval = 20
eval_tokens = 65536
eval_batch_size = 4
patience = 3          # fine-tuning soon fits the training text alone
sample_interval = 40
