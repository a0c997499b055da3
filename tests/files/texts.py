"""Texts on which tokenizers part ways."""

HARD_TEXTS = [
    "",
    " ",
    "Hello world",
    "  two leading, two trailing  ",
    "a" + " " * 37 + "b" + " " * 3 + "\t\t\n\n\n   c",
    "numbers 1 12 123 1234567890 3.14159 1e-10 ٣٤٥ ²³ Ⅷ",
    "I'll can't WE'RE it's O'Neil 'tis",
    "naïve café — “quotes” … ﬁ ﬂ Å Å é é",
    "combining: a\u0301e\u0302\u0323 Z\u0351\u036b\u0343 नमस्ते กำลัง",
    "日本語のテキスト、中文文本。한국어 텍스트 ひらがなカタカナ",
    "emoji 😀 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇯🇵🇫🇷 ☃️",
    "مرحبا بالعالم שלום עולם \u200fmixed\u200e",
    'def f(x: int) -> str:\n    """Doc."""\n\treturn f"{x!r:>{width}}"  # comment\n\n\nclass A(B): pass\n',
    "<|im_start|>user\nHi<|im_end|><|endoftext|> <|im_end|>x<|im_start|",
    "<|im_en<|im_end|>d|> <empty_output> <repo_name>a/b<file_sep>",
    "\u0000\u0001\u001f\u007f\u00a0\u00ad\u200b\u2028\u2029\ufeff\ufffd\ue000\U0010ffff",
    "\r\n\r\n \n \r\n\t mixed\rline\u0085ends\u000b\u000c",
    "https://example.org/a?b=c&d=%20#e user@example.org C:\\path\\to",
    "x" * 300 + "!?" * 50 + "----====____",
    "a\u3000b\u2003c\u00a0\u00a0d",
]
