"""Azure LLM inference traces of 2023 (Splitwise), 2024 (DynamoLLM) and 2025 (ModServe, multimodal).

One set of columns and three ways to write the time: 2023 has CRLF line ends and seven fraction digits, 2024
six digits and ``+00:00``, 2025 three digits and ``Z``; ISO 8601 covers them all. ``NumImages`` (2025) is not
read: the simulator knows no images, and what they cost is not in the file.

https://github.com/Azure/AzurePublicDataset
"""

from __future__ import annotations

from traces.csvformat import CsvFormat

AZURE = CsvFormat(name="azure", time="TIMESTAMP", prompt="ContextTokens", output="GeneratedTokens", clock="iso")
