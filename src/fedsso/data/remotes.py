"""Where the official files of the data sets are.

SHA-256 sums and sizes: as recorded by TensorFlow Datasets for MNIST, Fashion-MNIST, EMNIST,
CIFAR-10, Shakespeare and Sentiment140; those of the heart files belong to the files whose MD5 sums
FLamby records. No public record was found for the LIBSVM files: there the data set's reader decides
whether a download is the right one.
"""

from __future__ import annotations

from .fetch import Remote

_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary"

_EMNIST = Remote(  # one archive holds all of EMNIST: whichever set is asked for, all three arrive
    "gzip.zip",
    (
        "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
        "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/gzip.zip",
    ),
    "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
    561753746,
    tuple(
        (f"gzip/{file}", f"emnist/{file}")
        for split in ("digits", "letters", "balanced")
        for part in ("train", "test")
        for file in (
            f"emnist-{split}-{part}-images-idx3-ubyte.gz",
            f"emnist-{split}-{part}-labels-idx1-ubyte.gz",
        )
    ),
)

_CIFAR = "cifar-10-batches-bin"


def _same_name(
    below: str, servers: tuple[str, ...], *files: tuple[str, str, int]
) -> tuple[Remote, ...]:
    """Files (name, SHA-256, size) that every server has under that name."""
    return tuple(
        Remote(below + file, tuple(f"{s}/{file}" for s in servers), sha, size)
        for file, sha, size in files
    )


REMOTES: dict[str, tuple[Remote, ...]] = {
    "mnist": _same_name(
        "mnist/",
        (
            "https://storage.googleapis.com/cvdf-datasets/mnist",
            "https://ossci-datasets.s3.amazonaws.com/mnist",
        ),
        (
            "train-images-idx3-ubyte.gz",
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            9912422,
        ),
        (
            "train-labels-idx1-ubyte.gz",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            28881,
        ),
        (
            "t10k-images-idx3-ubyte.gz",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            1648877,
        ),
        (
            "t10k-labels-idx1-ubyte.gz",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            4542,
        ),
    ),
    "fashion_mnist": _same_name(
        "fashion_mnist/",
        (
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        ),
        (
            "train-images-idx3-ubyte.gz",
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            26421880,
        ),
        (
            "train-labels-idx1-ubyte.gz",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            29515,
        ),
        (
            "t10k-images-idx3-ubyte.gz",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            4422102,
        ),
        (
            "t10k-labels-idx1-ubyte.gz",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            5148,
        ),
    ),
    "emnist_digits": (_EMNIST,),
    "emnist_letters": (_EMNIST,),
    "emnist_balanced": (_EMNIST,),
    "cifar10": (
        Remote(
            "cifar-10-binary.tar.gz",
            (
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "https://cave.cs.toronto.edu/kriz/cifar-10-binary.tar.gz",
            ),
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            170052171,
            (
                *(
                    (f"{_CIFAR}/data_batch_{i}.bin", f"{_CIFAR}/data_batch_{i}.bin")
                    for i in range(1, 6)
                ),
                (f"{_CIFAR}/test_batch.bin", f"{_CIFAR}/test_batch.bin"),
                (f"{_CIFAR}/batches.meta.txt", f"{_CIFAR}/batches.meta.txt"),
            ),
        ),
    ),
    "shakespeare": (
        Remote(
            "tinyshakespeare.txt",
            (
                "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            ),
            "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            1115394,
        ),
    ),
    "sentiment140": (
        Remote(
            "trainingandtestdata.zip",
            (
                "https://cs.stanford.edu/people/alecmgo/trainingandtestdata.zip",
                "http://cs.stanford.edu/people/alecmgo/trainingandtestdata.zip",
            ),
            "004a3772c8a7ff9bbfeb875880f47f0679d93fc63e5cf9cff72d54a8a6162e57",
            81363704,
            (
                (
                    "training.1600000.processed.noemoticon.csv",
                    "sentiment140/training.1600000.processed.noemoticon.csv",
                ),
            ),
        ),
    ),
    "ijcnn1": _same_name("", (_LIBSVM,), ("ijcnn1.bz2", "", 0), ("ijcnn1.t.bz2", "", 0)),
    "a9a": _same_name("", (_LIBSVM,), ("a9a", "", 0), ("a9a.t", "", 0)),
    "phishing": _same_name("", (_LIBSVM,), ("phishing", "", 0)),
    "heart": _same_name(
        "",
        ("https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease",),
        (
            "processed.cleveland.data",
            "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
            18461,
        ),
        (
            "processed.hungarian.data",
            "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",
            10263,
        ),
        (
            "processed.switzerland.data",
            "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314",
            4109,
        ),
        (
            "processed.va.data",
            "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",
            6737,
        ),
    ),
}
