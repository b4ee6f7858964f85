"""Trains `src/course_llm/data/tokenizer.json` on the training side of the corpus: always the same bytes."""

from course_llm.corpus import training_documents
from course_llm.tokenizer import TOKENIZER_PATH, CourseTokenizer

VOCAB = 2048

if __name__ == "__main__":
    tokenizer = CourseTokenizer.train(training_documents(), VOCAB)
    tokenizer.save(TOKENIZER_PATH)
    tokens = sum(map(len, tokenizer.encode_batch(training_documents())))
    print(f"{tokenizer.vocab} tokens; the training side is {tokens:,} tokens long")
