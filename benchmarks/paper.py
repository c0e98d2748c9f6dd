"""The measurements of the paper "Distributed GPT-2" (Sahdev, Mathews, Guerrero): Tables 1 and 2, and its samples."""

from gpt2core.app.output.loss_plot import Curve

# {name of a program of the paper: line style of its curve}
LINE_STYLES = {"serial": "-", "MPI": "--", "CUDA": "-.", "MPI and CUDA": ":"}
# {program: losses of its 50 steps, in nats per token}
CURVES = {
    "serial": """
        5.168034 4.835179 4.635695 4.498031 4.307395 4.116387 3.955092 3.768782 3.616539 3.425641 3.287244 3.151229
        2.972546 2.845131 2.692842 2.594075 2.459776 2.358055 2.234961 2.140623 2.057503 1.959350 1.889150 1.808680
        1.731022 1.663653 1.595727 1.549898 1.486133 1.449035 1.384689 1.346302 1.317822 1.268267 1.242517 1.204523
        1.169466 1.147755 1.106339 1.098106 1.058793 1.052256 1.019223 0.994312 0.997309 0.956744 0.957396 0.929843
        0.910516 0.908195""",
    "MPI": """
        5.201166 4.909738 4.657234 4.513676 4.372570 4.194777 4.019602 3.812284 3.634256 3.444267 3.286560 3.135570
        2.969585 2.834611 2.713197 2.580026 2.452893 2.337913 2.247525 2.161558 2.067901 1.986983 1.920686 1.843655
        1.770636 1.725614 1.664273 1.628996 1.559248 1.525455 1.470772 1.439264 1.399520 1.375479 1.321622 1.319988
        1.286617 1.266407 1.233488 1.219159 1.210178 1.181083 1.168295 1.149404 1.140108 1.127041 1.089700 1.090754
        1.075718 1.072370""",
    "CUDA": """
        5.168034 4.828819 4.693434 4.599409 4.438262 4.275943 4.188701 3.979571 3.850794 3.666654 3.600918 3.401670
        3.263098 3.147053 2.984125 2.916426 2.756461 2.672071 2.546729 2.437326 2.355522 2.225365 2.179677 2.055092
        1.972043 1.899132 1.809431 1.765366 1.681660 1.637654 1.566861 1.516590 1.480041 1.410141 1.389990 1.332015
        1.294037 1.262068 1.213218 1.195222 1.151835 1.139206 1.100039 1.074328 1.060757 1.018466 1.014140 0.975913
        0.951944 0.937564""",
    "MPI and CUDA": """
        5.168032 4.848721 4.733808 4.667499 4.585856 4.485087 4.339321 4.226109 4.053402 3.947483 3.812050 3.674679
        3.556235 3.392360 3.283488 3.142538 3.035375 2.904566 2.775875 2.684566 2.561371 2.449701 2.361585 2.276168
        2.182588 2.127309 2.021111 1.962746 1.887382 1.821456 1.745462 1.690155 1.615830 1.587385 1.521429 1.492083
        1.458650 1.408189 1.376131 1.336293 1.320888 1.269017 1.257959 1.214961 1.194417 1.176377 1.134088 1.130392
        1.092683 1.081243""",
}
LOSSES = {program: [float(loss) for loss in text.split()] for program, text in CURVES.items()}


def paper_curves():
    """[Curve] of the paper's four programs, in grey."""
    return [
        Curve(f"paper, {program}", list(range(50)), LOSSES[program], {"color": "0.5", "linestyle": style})
        for program, style in LINE_STYLES.items()
    ]


# Table 1, in seconds, {program: (training, inference)}. "MPI" is the program on two CPUs with `mpirun -n 8`.
SECONDS = {
    "serial": (15264.36, 112.62),
    "MPI": (1287.76, 112.28),
    "CUDA": (429.44, 8.01),
    "MPI and CUDA": (226.39, 7.80),
}
MPI_SECONDS_IN_TEXT = 12878.0  # sections 9.1 and 9.3; Table 1 has 1287.76
PROCESSES = {"slides": 4, "command": 8}  # MPI processes according to the slides and to the command in section 8
CPU = "Intel Core i7-7820HQ, 4 cores (two machines for MPI)"
GPU = "NVIDIA Quadro M1200 (two machines for MPI and CUDA)"
SAMPLES = {  # Figures 6 to 9: the 30 new tokens after the same 256 tokens
    "serial": "Tinkering with an absurdly long paragraph that there are many tokens so the closer this feels to. The "
    "dummy data scientists, and seas made of entropy, and",
    "MPI": "Tinkering with their minimal GPT implementations. The dummy data, and seas made of entropy, and seas made "
    "of entropy, and seas made of entropy, and",
    "CUDA": "tinkering with an absurdly long paragraph that there are many tokens so the closer this feels to a corpus "
    "even if it is just generated prose. The dummy data",
    "MPI and CUDA": "tinkering with an absurdly long paragraph that there are many tokens so the network will see "
    "enough variety to a corpus even if it is that there are many tokens",
}
